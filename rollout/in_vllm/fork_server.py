"""Imports vLLM for an engine's process while the rollout worker imports it for itself.

    rollout worker        begin()   imports vLLM      builds the config   fork_engine(): EngineCore ----+
                             |                                                                         |
    fork server              +----> preload.py: imports vLLM, then waits ------------------------------+--> forks it

Without this, vLLM spawns the EngineCore process after the worker's own import, and it imports all of it again: 16 s of
a start on a host with GPUs, one after the other. The fork server is multiprocessing's; it runs no kernel and never
opens a GPU, so that what is forked from it may.

Owns: that server, and the context that vLLM gets for its EngineCore. Does not own: the workers of an engine with
tp_size > 1, which their EngineCore spawns (process_imports.py).
Invariant: the EngineCore has the environment that a spawned one would have, as it was when vLLM asked for it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Generator
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from rollout.in_vllm.vllm_patches import make_processes_in

logger = logging.getLogger(__name__)

PRELOAD = "rollout.in_vllm.preload"
_UNUSED, _BEGUN, _USED = range(3)
_state = _UNUSED


def begin() -> None:
    """Start the fork server of this process's first engine. Call it with the engine's environment set, before vLLM is
    imported here. Later calls do nothing: the server imported vLLM under the first engine's environment.
    """
    global _state
    if _state == _UNUSED:
        _state = _BEGUN
        multiprocessing.set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()


@contextlib.contextmanager
def fork_engine() -> Generator[None]:
    """While the block runs, vLLM forks its EngineCore from the server. Without begin(), for a second engine of this
    process, and where the import of vLLM has opened a GPU, the block changes nothing: vLLM spawns it.
    """
    global _state
    is_begun, _state = _state == _BEGUN, _USED
    if not is_begun:
        yield
        return
    if import_module("torch").cuda.is_initialized():
        logger.warning("an import opened a GPU: vLLM is imported once more, in the engine's process")
        yield
        return
    with make_processes_in(EngineContext()):
        yield


class _Process(ForkServerProcess):
    """A process with the environment in which it was made. (A fork server's children have the server's.)"""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        """Called in the forked process."""
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        # Only what differs: setproctitle looks for the strings with which the process began.
        os.environ.update({name: value for name, value in self._environment.items() if os.environ.get(name) != value})
        super().run()


class EngineContext(ForkServerContext):
    """What vLLM makes its EngineCore in."""

    Process = _Process  # type: ignore[assignment]
