"""One rank of a push, its sender a fake: what it does in which order."""

from __future__ import annotations

import dataclasses
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.conf.schema import Device
from slipstream.orchestrator.push import sender_process as push_rank
from slipstream.orchestrator.push.sender_process import RankOptions
from slipstream.weight_sync import api
from slipstream.weight_sync.disk import safetensors_source as checkpoint
from slipstream.weight_sync.errors import PlanError

OPTIONS = RankOptions(
    checkpoint=Path(),
    world_size=1,
    num_threads=1,
    device=Device.cpu.value,
    host="127.0.0.1",
    transport="tcp",
    watermark_bytes=1 << 20,
    timeout_s=5.0,
    key=bytes(32),
    rendezvous="",
)


@dataclasses.dataclass
class FakeSender:
    """Notes what it is asked."""

    calls: list[str]
    plans: bool
    link: str = "tcp"

    def plan_for(self, layouts: object) -> None:
        self.calls.append("plan")
        if not self.plans:
            raise PlanError("not these")

    def connect(self, engines: object) -> None:
        self.calls.append("connect")

    def update(self, version: int) -> str:
        self.calls.append("update")
        return "a report"

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize(
    ("orders", "plans", "calls"),
    [
        (["connect", "publish"], True, ["connect", "freeze", "update", "close"]),
        (["plan", "connect", "publish"], True, ["plan", "freeze", "connect", "update", "close"]),
        (["plan", "connect", "publish"], False, ["plan", "connect", "freeze", "update", "close"]),
    ],
)
def test_the_heap_is_frozen_once_when_there_is_a_plan(
    monkeypatch: pytest.MonkeyPatch, orders: list[str], plans: bool, calls: list[str]
) -> None:
    found: list[str] = []
    read = SimpleNamespace(num_bytes=1, seconds=0.1, pinned_bytes=0)
    share = SimpleNamespace(source=None, read=lambda: read, num_bytes_read=1)
    monkeypatch.setattr(api, "Sender", lambda *_, **__: FakeSender(found, plans))
    monkeypatch.setattr(checkpoint, "Checkpoint", lambda *_, **__: share)
    monkeypatch.setattr(push_rank, "freeze_heap", lambda: found.append("freeze"))
    command, rank = Pipe()
    for order in orders:
        command.send((order, []))
    push_rank._read_and_send(0, OPTIONS, rank, SimpleNamespace(value=0))  # type: ignore[arg-type]
    assert found == calls
