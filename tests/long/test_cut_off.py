"""A node that is a network namespace is cut off and reached again. Needs root, ip (iproute2) and nft (nftables)."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.chaos.ways import check_can_be_cut, cut_off

NODES = {"slipstream-cut-a": "10.215.0.1", "slipstream-cut-b": "10.215.0.2"}
ELSEWHERE, NODE = NODES
ADDRESS = NODES[NODE]
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 8000), timeout=2)"


@pytest.fixture
def server() -> Iterator[psutil.Process]:
    """A process in a node, which another one reaches at its address, and who shares its namespace at loopback, too."""
    try:
        for node in NODES:
            subprocess.run(["ip", "netns", "add", node], check=True)
        pair = ["ip", "link", "add", "cut0", "netns", ELSEWHERE, "type", "veth", "peer", "name", "cut0", "netns", NODE]
        subprocess.run(pair, check=True)
        for node, address in NODES.items():
            subprocess.run(["ip", "-n", node, "address", "add", f"{address}/30", "dev", "cut0"], check=True)
            for interface in ("lo", "cut0"):
                subprocess.run(["ip", "-n", node, "link", "set", interface, "up"], check=True)
        words = ["ip", "netns", "exec", NODE, sys.executable, "-u", "-m", "http.server", "8000"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield psutil.Process(process.pid)
            process.kill()
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node], check=False)


def reaches(node: str, address: str) -> bool:
    """Whether the server is reached at this address from there."""
    words = ["ip", "netns", "exec", node, sys.executable, "-c", CONNECT, address]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def test_a_node_is_cut_off_until_the_end_of_the_block_or_of_its_time(server: psutil.Process) -> None:
    check_can_be_cut("worker-1", server)
    assert reaches(ELSEWHERE, ADDRESS)
    with pytest.raises(KeyboardInterrupt), cut_off("worker-1", server, 1000):
        assert not reaches(ELSEWHERE, ADDRESS)
        assert reaches(NODE, "127.0.0.1")
        raise KeyboardInterrupt
    assert reaches(ELSEWHERE, ADDRESS)
    with cut_off("worker-1", server, 0.5):  # as where this command is killed
        deadline = time.monotonic() + 60
        while not reaches(ELSEWHERE, ADDRESS):
            assert time.monotonic() < deadline, "the kernel does not undo it"


def test_without_nft_the_message_names_its_package(server: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"needs nsenter .* and nft \(package nftables\)"):
        check_can_be_cut("worker-1", server)
