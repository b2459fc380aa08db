"""One rank of a push, its sender a fake: what it does in which order."""

import dataclasses
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Device
from slipstream.orchestrator.push import sender_process as push_rank
from slipstream.orchestrator.push.push_options import PushOptions
from slipstream.orchestrator.push.sender_process import RankOptions, RankProcess
from slipstream.rollout.channel import BlockingChannel
from slipstream.weight_sync import api
from slipstream.weight_sync.disk import safetensors_source as checkpoint
from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.record.layout_wire import layouts_to_bytes
from slipstream.weight_sync.typed_msgpack import pack

OPTIONS = RankOptions(
    PushOptions(checkpoint=Path(), start=1, num_threads=1, transport="tcp", watermark_mib=1, timeout_s=5.0),
    world_size=1,
    device=Device.cpu.value,
    host="127.0.0.1",
    delta_bytes=0,
    key=bytes(32),
    rendezvous="",
)


def test_a_rank_beside_the_users_other_files_has_pythons_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('rows of the user')\n")
    monkeypatch.chdir(tmp_path)
    there_is_none = dataclasses.replace(OPTIONS.push, checkpoint=tmp_path / "absent")
    rank = RankProcess(0, dataclasses.replace(OPTIONS, push=there_is_none), None)
    try:
        with pytest.raises(ConfigError, match="absent"):
            rank.result(120.0)
    finally:
        rank.stop()


@dataclasses.dataclass
class FakeSender:
    """Notes what it is asked."""

    calls: list[str]
    link: str = "tcp"

    def plan_for(self, layouts: object) -> None:
        self.calls.append("plan")
        raise PlanError("not these")

    def connect(self, engines: object) -> None:
        self.calls.append("connect")

    def note_base(self) -> None:
        self.calls.append("note base")

    def update(self, version: int) -> str:
        self.calls.append("update")
        return "a report"

    def close(self) -> None:
        self.calls.append("close")


READ = SimpleNamespace(num_bytes=1, seconds=0.1, pinned_bytes=0)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank asks of its sender and of the checkpoint, in order."""
    calls: list[str] = []

    def reads(*folder: Path) -> SimpleNamespace:
        calls.append(f"read {folder or 'first'}")
        return READ

    share = SimpleNamespace(source=None, read=reads, refresh=reads, num_bytes_read=1)
    monkeypatch.setattr(api, "Sender", lambda *_, **__: FakeSender(calls))
    monkeypatch.setattr(checkpoint, "Checkpoint", lambda folder, **_: calls.append(str(folder)) or share)
    monkeypatch.setattr(push_rank, "freeze_heap", lambda: None)
    return calls


def test_expected_layouts_without_a_plan_are_planned_for_when_engines_are_met(found: list[str]) -> None:
    command, rank = map(BlockingChannel, socket.socketpair())
    for order in (["plan", layouts_to_bytes(()), 1], ["connect", []], ["publish"]):
        command.send(order)
    push_rank._read_and_send(0, OPTIONS, rank)
    assert [call for call in found if not call.startswith("read")] == [".", "plan", "connect", "update", "close"]


def test_a_base_is_noted_once_engines_are_met_before_the_checkpoint_is_read(found: list[str]) -> None:
    push = dataclasses.replace(OPTIONS.push, base=Path("old"), checkpoint=Path("new"), start=0, to=("a",))
    options = dataclasses.replace(OPTIONS, push=push)
    command, rank = map(BlockingChannel, socket.socketpair())
    command.send(["connect", []])
    rank_thread = threading.Thread(target=push_rank._read_and_send, args=(0, options, rank), daemon=True)
    rank_thread.start()

    def answer() -> Any:
        while (said := command.receive())[0] == "so far":
            assert said == ["so far", 1]
        return said

    answers = [answer(), answer()]
    command.send(["publish"])
    assert answer() == ["done", pack("a report"), "tcp"]
    rank_thread.join(10)
    assert [answer[0] for answer in answers] == ["connected", "read"]
    assert answers[0][1].keys() == {"connect", "base"}
    assert found == ["old", "read first", "connect", "note base", f"read {(Path('new'),)}", "update", "close"]
