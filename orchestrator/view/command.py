"""`slipstream view`: checks what was asked for, then serves the page until it is interrupted, or writes it with what it
shows as one file that needs no server.

    page files --inlined--> FILE.html <--embedded-- metrics, timelines, fleet, options, some samples

Owns: the order of things, what is printed; which samples and steps are in the file, its size, how modules become one
script. Does not own: addresses (server.py), the page.
Invariants: the file loads nothing from anywhere (its policy forbids it), and what comes from a run is in it as data,
in which no `<` is left.
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.files.outputs import check_can_write, write_output
from slipstream.orchestrator.view.run_reader import RunReader
from slipstream.orchestrator.view.samples import PAGE, SampleQuery
from slipstream.orchestrator.view.server import MODULES, ViewServer, answer, page_file

MOST_RUNS = 12


def run_view(runs: Sequence[Path], say: Callable[[str], None], *, port: int = 0, export: Path | None = None) -> None:
    """Serve until cancelled, or export. Raises ConfigError: a RUN is no run folder, the port is taken, or the file
    cannot be written."""
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


MOST_SAMPLE_BYTES = 16 << 20
"""Bytes of samples of each run, as JSON."""
MOST_TIMELINES = 200
"""Steps of each run whose timelines are in the file: the last ones."""
SAMPLE_ORDERS = ("worst k3", "highest reward", "lowest reward", "longest", "newest")
"""The first page of each is in the file, and so are truncated ones and episodes."""


def write_page(readers: Sequence[RunReader], path: Path) -> int:
    """Write the file. Returns its bytes. Raises ConfigError: it cannot be written."""
    content = page({"runs": [snapshot(reader) for reader in readers]}).encode()
    try:
        write_output(path, content)
    except OSError as error:
        raise ConfigError(
            f"--export {path} cannot be written ({error.strerror}); give a file in a folder that is there"
        ) from error
    return len(content)


def snapshot(reader: RunReader) -> JsonObject:
    """What the file has of one run: "answers" has what a server's addresses would say (server.answer)."""
    timelines = reader.steps_with_timeline()
    steps = timelines["steps"][-MOST_TIMELINES:]
    traces = timelines["traces"][-1:]
    listed, details = samples_of(reader)
    return {
        "summary": {**reader.summary(), "state": "exported"},
        "metrics": reader.metrics(None, 0),
        "all_samples": reader.samples(SampleQuery())["all"],
        "samples": listed,
        "answers": {
            **{what: answer(reader, what, None, {}) for what in ("options", "environment", "fleet")},
            "timeline": {"steps": steps, "traces": traces},
            **{f"timeline/{step}": reader.timeline(step) for step in steps},
            **{f"trace/{name}": reader.trace(name) for name in traces},
            **{f"sample/{number}": found for number, found in details.items()},
        },
    }


def samples_of(reader: RunReader) -> tuple[list[JsonObject], dict[int, JsonObject]]:
    """Rows of the list, and by number what is shown when they are opened."""
    queries = [SampleQuery(order=order) for order in SAMPLE_ORDERS]
    queries += [SampleQuery(flags=1), SampleQuery(kind="held-out"), SampleQuery(has_turns=True)]
    listed: dict[int, JsonObject] = {}
    details: dict[int, JsonObject] = {}
    left = MOST_SAMPLE_BYTES
    pages = [reader.samples(query)["rows"] for query in queries]
    in_turn = [page[place] for place in range(PAGE) for page in pages if place < len(page)]
    for row in in_turn:
        if row["number"] in listed:
            continue
        found = reader.sample(row["number"])
        size = len(json.dumps(found))
        if size > left:
            break
        left -= size
        listed[row["number"]] = row
        details[row["number"]] = found
    return [listed[number] for number in sorted(listed, reverse=True)], details


def page(data: JsonObject) -> str:
    script = joined_modules()
    plots = page_file("uplot/uPlot.iife.min.js")
    style = page_file("uplot/uPlot.min.css") + "\n" + page_file("style.css")
    policy = (
        f"default-src 'none'; script-src {_hash(plots)} {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    html = page_file("index.html")
    body = html[html.index("<body>") :].replace("</body>", "")
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>Slipstream</title>\n'
        f"<style>{style}</style>\n</head>\n{body}\n"
        f'<script type="application/json" id="data">{embedded}</script>\n'
        f"<script>{plots}</script>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def joined_modules() -> str:
    """The page's modules as one script: each in a function of its own, which returns what it exports.

    Modules keep to one form: `import { a, b } from "./x.js";` and `export` before `function`, `class` or `const`.
    """
    parts = ['"use strict";\nconst modules = {};']
    for name in MODULES:
        text = page_file(name)
        text = re.sub(r'^import \{([^}]*)\} from "\./([\w.]+)";$', r'const {\1} = modules["\2"];', text, flags=re.M)
        exported = re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", text, flags=re.M)
        text = re.sub(r"^export ", "", text, flags=re.M)
        parts.append(f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {", ".join(exported)} }};\n}})();')
    return "\n".join(parts)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
