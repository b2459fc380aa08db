"""Locks: where trainer ranks meet, and who may reach that place."""

import socket
import threading

import psutil
import pytest
import torch.distributed as dist

from slipstream.trainer.errors import TrainerError
from slipstream.trainer.process_group import _meeting_point


def test_ranks_meet_on_the_given_address_alone() -> None:
    """Although another socket of the same process keeps the port reserved, as `TrainerActor.pick_rendezvous` does."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        stores: dict[int, dist.Store] = {}

        def join(rank: int) -> None:
            stores[rank] = _meeting_point(f"tcp://127.0.0.1:{port}", rank, 2)["store"]

        ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        stores[1].set("who", "rank 1")
        assert stores[0].get("who") == b"rank 1"
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_a_file_is_a_meeting_point_too() -> None:
    assert _meeting_point("file:///tmp/x", 0, 2) == {"init_method": "file:///tmp/x"}


def test_a_meeting_point_without_a_port_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"tcp://host:port, got 'tcp://localhost'"):
        _meeting_point("tcp://localhost", 0, 2)
