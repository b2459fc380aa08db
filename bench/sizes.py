"""How large the house is: lines, options, patches, ways to call another process, hops, and what weakens types.

    make sizes              the working tree
    make sizes REF=2a38aea  that commit beside it

Owns: what is counted, and the lists that a machine cannot count (`WAYS`, `PROCESSES`, the hops). Needs Python and git
alone. Whoever adds a way to call, a process or a hop names it here; whoever removes one moves it to `GONE`, so that it
is counted in an older commit. An entry that is not true of the working tree is an error.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("conf", "weight_sync", "trainer", "rollout", "fleet", "orchestrator")
CODE = (".py", ".js", ".css", ".html", ".jinja")

WAYS = {
    "Ray's calls, for what it places": "orchestrator/cluster/ray_handles.py",
    "verbs of a worker, of a replica, and of an engine's rank while it samples": "weight_sync/calls/connection.py",
    "a process and one that it starts or has forked: a socket that both hold": "rollout/channel.py",
    "requests to a run: files in its folder": "orchestrator/control/control_folder.py",
}
"""A way of our own, or Ray's, to call code in another process -> the module that implements it. vLLM's calls of its own
ranks, and torch's collectives, are theirs."""

PROCESSES = {
    "Ray actor: where Ray places and watches the worker": "orchestrator/cluster/actors.py",
    "worker: its event loop shares no interpreter with Ray's threads": "rollout/worker_process.py",
    "vLLM's EngineCore: as vLLM starts it": "rollout/engine/vllm_process.py",
    "vLLM's rank, one per GPU of the engine: as vLLM starts it": "rollout/in_vllm/worker_extension.py",
    "fork server, one per node: has imported vLLM once": "rollout/in_vllm/fork_server.py",
}
"""Processes of an engine, with the reason of each -> where it is started or what runs in it."""

PROMPT = (
    "orchestrator/loop/sampler.py run",
    "fleet/router.py generate_group",
    "fleet/roster.py least_loaded",
    "weight_sync/calls/connection.py call",
    "weight_sync/calls/server.py _serve",
    "rollout/worker.py generate_group",
    "rollout/engine/vllm_engine.py generate_group",
)
"""What a prompt passes from the loop to vLLM: calls from one class to another."""
PUBLISH = (
    "orchestrator/loop/controller.py publish",
    "orchestrator/loop/publication.py run",
    "orchestrator/loop/publication.py _write",
    "orchestrator/cluster/ray_handles.py publish",
    "orchestrator/cluster/ray_handles.py _on_all",
    "orchestrator/cluster/ray_cluster.py result_of",
    "orchestrator/cluster/actors.py publish",
    "trainer/delivery/delivery.py publish",
    "weight_sync/publish/publisher.py publish",
    "weight_sync/publish/publisher.py _publish_to",
    "weight_sync/publish/transaction.py begin",
    "weight_sync/replica/clients.py ask",
    "weight_sync/calls/connection.py call",
    "weight_sync/calls/server.py _serve",
    "weight_sync/replica/endpoint.py begin",
    "rollout/base_replica.py begin",
    "rollout/base_replica.py _ask",
    "rollout/engine/vllm_engine.py call_ranks",
    "rollout/receivers.py begin",
    "weight_sync/replica/receiver.py begin",
)
"""What the control of a publish passes from the loop to an engine's memory."""
GONE = {
    "ways to call another process": (
        "rollout/worker_process.py call",
        "rollout/sampling_calls.py",
        "rollout/slot_channel.py",
        "rollout/calls.py",
        "weight_sync/replica/control_client.py",
        "orchestrator/fleet/control_folder.py",
        "rollout/rewards/processes/frames.py",
        "rollout/agents/channel.py",
        "rollout/user_processes/channel.py",
        "rollout/in_vllm/preload.py",
        "orchestrator/push/sender_process.py _run",
    ),
    "processes of an engine": (),
    "hops of a prompt": (
        "orchestrator/fleet/router.py generate_group",
        "orchestrator/fleet/supervisor.py least_loaded",
        "fleet/supervisor.py least_loaded",
        "orchestrator/cluster/ray_handles.py generate_group",
        "rollout/sampling_calls.py generate_group",
        "rollout/sampling_calls.py _serve",
        "rollout/calls.py call",
        "rollout/calls.py _serve",
    ),
    "hops of a publish": (
        "weight_sync/publish/publisher.py _publish_wave",
        "rollout/worker.py begin",
        "weight_sync/replica/control_client.py call",
        "weight_sync/replica/control_server.py _serve",
        "weight_sync/replica/control_server.py answer",
        "weight_sync/replica/control_server.py _begin",
        "rollout/worker.py _call_ranks",
        "rollout/base_replica.py _call_ranks",
        "rollout/in_vllm/worker_extension.py slipstream_begin",
    ),
}
"""What the working tree has no more, by the row that counts it."""


def main() -> None:
    parser = argparse.ArgumentParser(description="How large the house is.")
    parser.add_argument("ref", nargs="?", help="a commit to put beside the working tree")
    ref: str | None = parser.parse_args().ref
    if untrue := untrue_entries():
        sys.exit("what bench/sizes.py lists is not so: " + "; ".join(untrue))
    columns = {"now": sizes_of(ROOT)}
    if ref is not None:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", ref], cwd=ROOT, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            columns = {ref: sizes_of(Path(folder)), **columns}
    print(f"{'':44}" + "".join(f"{name:>10}" for name in columns))
    for row in columns["now"]:
        print(f"{row:44}" + "".join(f"{sizes[row]:>10,}" for sizes in columns.values()))


def sizes_of(root: Path) -> dict[str, int]:
    """Every row for one tree."""
    texts = {path: path.read_text(encoding="utf-8") for name in PACKAGES for path in _files(root / name, CODE)}
    lines = {name: sum(_lines(t) for p, t in texts.items() if p.is_relative_to(root / name)) for name in PACKAGES}
    python = {path: text for path, text in texts.items() if path.suffix == ".py"}
    tests = {path: path.read_text(encoding="utf-8") for path in _files(root / "tests", (".py",))}
    return {
        "product, lines": sum(lines.values()),
        **{f"  {name}": number for name, number in lines.items()},
        "tests, lines": sum(map(_lines, tests.values())),
        "bench and examples, lines": sum(
            _lines(path.read_text(encoding="utf-8"))
            for name in ("bench", "examples")
            for path in _files(root / name, (".py",))
        ),
        "docs, lines": sum(_lines(path.read_text(encoding="utf-8")) for path in _files(root / "docs", (".md",))),
        "options": len(_options(root)),
        "patches of vLLM and Triton": _num_patches(root),
        **{name: sum(_is_there(root, entry) for entry in (*entries, *GONE[name])) for name, entries in _LISTS.items()},
        "lines with Any": _matches(python, r"\bAny\b"),
        "lines with cast(": _matches(python, r"\bcast\((\"|[A-Z]|dict|list|tuple|type)"),
        "broad excepts": _matches(python, r"except (Base)?Exception\b"),
        "suppressions of linters and types": _matches(python, r"# (type:|pyright:|noqa)"),
        "tests": sum(_num_tests(text) for text in tests.values()),
    }


_LISTS = {
    "ways to call another process": tuple(WAYS.values()),
    "processes of an engine": tuple(PROCESSES.values()),
    "hops of a prompt": PROMPT,
    "hops of a publish": PUBLISH,
}


def untrue_entries() -> list[str]:
    """Modules and functions that the lists name and the working tree does not have, and those of GONE that it has."""
    listed = [entry for entries in _LISTS.values() for entry in entries]
    gone = [entry for entries in GONE.values() for entry in entries]
    return [e for e in listed if not _is_there(ROOT, e)] + [e for e in gone if _is_there(ROOT, e)]


def _is_there(root: Path, entry: str) -> bool:
    """Whether a tree has `FILE`, or `FILE FUNCTION`."""
    name, _, function = entry.partition(" ")
    path = root / name
    return path.is_file() and (not function or re.search(rf"def {function}\(", path.read_text()) is not None)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts)


def _lines(text: str) -> int:
    return text.count("\n")


def _matches(texts: dict[Path, str], pattern: str) -> int:
    """Lines that have it, imports of it aside."""
    found = re.compile(pattern)
    return sum(
        1
        for text in texts.values()
        for line in text.splitlines()
        if found.search(line) and not line.startswith(("from typing import", "import "))
    )


def _options(root: Path) -> list[str]:
    """Rows of the page that a unit test holds equal to the schema."""
    return re.findall(r"^\| `(\w+\.[\w.]+)` \|", (root / "docs/options.md").read_text(), re.MULTILINE)


def _num_patches(root: Path) -> int:
    """Entries of the list at the top of vllm_patches.py, and attributes of Triton that are replaced."""
    patches = ast.get_docstring(ast.parse((root / "rollout/in_vllm/vllm_patches.py").read_text()), clean=False) or ""
    triton = root / "rollout/in_vllm/compiled_in_forks.py"
    replaced = re.search(r"replaced\(JITFunction, \{(.*)\}", triton.read_text()) if triton.is_file() else None
    num_triton = 0 if replaced is None else replaced[1].count(":")
    return len(re.findall(r"^    [a-z_]+(?: +(?:0\.\d\d|both) .*)?$", patches, re.MULTILINE)) + num_triton


def _num_tests(text: str) -> int:
    return len(re.findall(r"^\s*(?:async )?def test_\w+\(", text, re.MULTILINE))


if __name__ == "__main__":
    main()
