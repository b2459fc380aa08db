"""`slipstream view`: checks what was asked for, then serves the page until it is interrupted, or writes one file.

Owns: the order of things and what is printed. Does not own: addresses (server.py), the file (export.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.files.outputs import check_can_write
from slipstream.orchestrator.view.export import write_page
from slipstream.orchestrator.view.run_reader import RunReader
from slipstream.orchestrator.view.server import ViewServer

MOST_RUNS = 12


def run_view(runs: Sequence[Path], say: Callable[[str], None], *, port: int = 0, export: Path | None = None) -> None:
    """Serve until cancelled, or export.

    Raises:
        ConfigError: a RUN is no run folder, the port is taken, or the file cannot be written.
    """
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"slipstream view shows at most {MOST_RUNS} runs at once, got {len(runs)}")
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port must be at most 65535, got {port}; 0 is any that is free")
    if export is not None:
        check_can_write(export, f"--export {export}")
    unique = {run.resolve(): run for run in runs}
    readers = [RunReader(run) for run in unique.values()]
    if export is not None:
        size = write_page(readers, export)
        say(f"{export}: {size / 1e6:.1f} MB, to be opened in any browser; it holds prompts and responses")
        return
    asyncio.run(_serve(readers, port, say))


async def _serve(readers: Sequence[RunReader], port: int, say: Callable[[str], None]) -> None:
    server = ViewServer(readers, port)
    await server.start()
    try:
        say(server.address)
        say("Open this address in a browser of this machine. Ctrl-C ends it.")
        await asyncio.Event().wait()
    finally:
        await server.stop()
