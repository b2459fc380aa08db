"""Nodes of a run: their order, what they are checked for, whose processes are ended."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st
from ray.exceptions import RayError

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.cluster import nodes
from slipstream.orchestrator.cluster.nodes import ProcessId, RayNodes, check_nodes, node_after_node


@given(st.dictionaries(st.integers(0, 20), st.sampled_from("abcd"), min_size=1))
def test_the_bundles_of_a_node_follow_each_other(held: dict[int, str]) -> None:
    ordered = node_after_node(held)
    assert sorted(ordered) == sorted(held), "each once"
    assert sum(held[one] != held[other] for one, other in pairwise(ordered)) == len(set(held.values())) - 1
    assert ordered[0] == min(held), "rank 0 stays where Ray put bundle 0"


class Elsewhere(RayNodes):
    """Nodes that are not this one, and what each finds: a dict, or an error."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found

    def name(self, node: str) -> str:
        return node

    def is_here(self, node: str) -> bool:
        return False

    def run(self, node: str, function: Callable[..., Any], *arguments: object) -> Any:
        if isinstance(self._found[node], Exception):
            raise self._found[node]
        return function(*arguments) | self._found[node]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with almost no weights."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1234")
    return folder


def test_every_node_that_does_not_fit_is_named_with_what_to_do(tmp_path: Path, checkpoint: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("run: {}\n")
    found: dict[str, Any] = {"10.0.0.1": {}, "10.0.0.11": {}}
    check_nodes(found, tmp_path, checkpoint, Elsewhere(found))
    found |= {
        "10.0.0.2": {str(config): ""},
        "10.0.0.3": {"torch": "1.0"},
        "10.0.0.4": RayError("ModuleNotFoundError: No module named 'orchestrator'"),
        "10.0.0.5": {"Slipstream's code": "0123"},
        "10.0.0.6": {"vllm-of-another-kind": "1.0"},
    }
    with pytest.raises(ConfigError) as refusal:
        check_nodes(found, tmp_path, checkpoint, Elsewhere(found))
    said = str(refusal.value)
    assert "10.0.0.1" not in said
    assert f"node 10.0.0.2: {config} is absent, and " in said
    assert " here; put it where every node mounts it" in said
    assert "node 10.0.0.3: torch is 1.0, and " in said
    assert "node 10.0.0.4: cannot run Slipstream's code (ModuleNotFoundError" in said
    assert "node 10.0.0.5: Slipstream's code is 0123, and " in said
    assert "node 10.0.0.6: vllm-of-another-kind is 1.0, and absent here" in said


@pytest.mark.parametrize("change", ["config.json", "model.safetensors", "another.safetensors"])
def test_another_checkpoint_under_the_same_path_is_seen(tmp_path: Path, checkpoint: Path, change: str) -> None:
    before = nodes.found_here(tmp_path, checkpoint)
    (checkpoint / change).write_bytes(b"other")
    after = nodes.found_here(tmp_path, checkpoint)
    assert {what for what in before if before[what] != after[what]} == {str(checkpoint)}


def test_the_code_of_every_package_is_compared() -> None:
    assert {file.relative_to(Path(nodes.__file__).parents[2]).parts[0] for file in nodes.sources()} == set(nodes.ROOMS)
    assert len(nodes.sources()) > 100


def test_a_tree_is_ended_but_not_a_later_process_of_the_same_pid() -> None:
    sleeper = "import time; time.sleep(60)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '{sleeper}']); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        watched = psutil.Process(process.pid)
        while not (children := watched.children()):
            pass
        assert nodes.end_trees_here([ProcessId(process.pid, ProcessId.of(watched).started - 1)]) == []
        assert process.poll() is None
        assert nodes.end_trees_here([ProcessId.of(watched)]) == []
        assert not children[0].is_running() or children[0].status() == psutil.STATUS_ZOMBIE
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("by_s", [3600, -3600])
def test_a_tree_is_ended_although_the_clock_was_set_meanwhile(
    by_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives a process's start as ticks since the boot, and the boot by the clock of now."""
    for entry in Path("/proc").iterdir():
        if entry.name != "stat":
            (tmp_path / entry.name).symlink_to(entry)
    lines = Path("/proc/stat").read_text().splitlines(keepends=True)
    with subprocess.Popen(["sleep", "600"]) as process:
        found = nodes.trees_of([process.pid])
        (tmp_path / "stat").write_text(
            "".join(f"btime {int(line.split()[1]) + by_s}\n" if line.startswith("btime") else line for line in lines)
        )
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
        (tmp_path / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        try:
            assert nodes.end_trees_here(found) == []
            assert process.poll() is not None
        finally:
            process.kill()


def test_trees_name_the_processes_that_were_asked_for_then_their_descendants_once() -> None:
    """What a fork server made for a worker does not descend from it."""
    program = (
        "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        found = nodes.trees_of([os.getpid(), ended.pid, parent.pid, child])
        assert nodes.end_trees_here(nodes.trees_of([parent.pid])) == []
    assert [one.pid for one in found[:3]] == [os.getpid(), parent.pid, child]
    assert len(set(found)) == len(found)


def test_the_end_of_a_lost_nodes_processes_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    lost = Elsewhere({"10.0.0.9": RayError("not schedulable")})
    nodes.end_trees("10.0.0.9", [ProcessId(1, 0)], lost)
    assert "node 10.0.0.9 is lost" in caplog.text


def test_processes_meet_over_the_card_of_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    nodes.meet_over("127.0.0.7")
    assert (nodes.os.environ["GLOO_SOCKET_IFNAME"], nodes.os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    nodes.meet_over("127.0.0.1")
    assert nodes.os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "the user's choice"
