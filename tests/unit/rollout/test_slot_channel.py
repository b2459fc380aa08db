"""Promises of rollout/slot_channel.py: calls reach every rank, errors keep their class, and silence has a
deadline."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.rollout.errors import EngineDied, EngineError
from slipstream.rollout.slot_channel import SWITCH_S, SlotClients, SlotServer, socket_address
from slipstream.weight_sync.errors import IntegrityError


def serve(folder: Path, rank: int, handlers: dict) -> None:
    SlotServer(socket_address(str(folder), rank), handlers, contextlib.nullcontext)


def fail(error: Exception):
    raise error


async def test_a_call_reaches_every_rank_and_returns_by_rank(tmp_path: Path):
    for rank in range(3):
        serve(tmp_path, rank, {"add": lambda a, data, rank=rank: [a + rank, data, threading.current_thread().name]})
    clients = SlotClients(str(tmp_path), 3, timeout_s=10, is_alive=lambda: True)
    try:
        assert await clients.call("add", 10, b"x") == [[10 + rank, b"x", "adapter-slots"] for rank in range(3)]
    finally:
        clients.close()


@pytest.mark.parametrize(
    ("error", "arrives"),
    [(IntegrityError("a bit"), IntegrityError), (ValueError("odd"), EngineError), (KeyError("x"), EngineError)],
)
async def test_an_error_arrives_as_its_own_class_and_the_thread_goes_on(tmp_path: Path, error, arrives):
    serve(tmp_path, 0, {"fail": lambda: fail(error), "work": lambda: 1})
    clients = SlotClients(str(tmp_path), 1, timeout_s=10, is_alive=lambda: True)
    try:
        with pytest.raises(arrives, match=r"a bit|odd|x"):
            await clients.call("fail")
        assert await clients.call("work") == [1]
    finally:
        clients.close()


async def test_a_rank_that_is_gone_is_not_waited_for_and_its_late_answer_is_not_taken_for_another(tmp_path: Path):
    go_on = threading.Event()
    serve(tmp_path, 0, {"stall": lambda: go_on.wait(60) and "late", "work": lambda: "mine"})
    clients = SlotClients(str(tmp_path), 1, timeout_s=60, is_alive=lambda: True)
    try:
        with pytest.raises(EngineDied, match="did not answer stall"):
            await clients.call("stall", timeout_s=0.1)
        go_on.set()
        assert await clients.call("work") == ["mine"]
    finally:
        clients.close()


async def test_two_callers_after_one_that_gave_up_get_their_own_answers(tmp_path: Path):
    """A publish, and a restarted worker that asks this one for an offer: neither drops what the other waits for."""
    go_on = threading.Event()
    serve(tmp_path, 0, {"stall": lambda: go_on.wait(60) and "late", "say": lambda what: what})
    clients = SlotClients(str(tmp_path), 1, timeout_s=60, is_alive=lambda: True)
    try:
        with pytest.raises(EngineDied, match="did not answer stall"):
            await clients.call("stall", timeout_s=0.1)
        both = asyncio.gather(*(clients.call("say", who) for who in range(2)))
        await asyncio.sleep(0)  # both have begun
        go_on.set()
        assert await both == [[0], [1]]
    finally:
        clients.close()


async def test_a_call_may_have_a_deadline_of_its_own(tmp_path: Path):
    serve(tmp_path, 0, {"read": lambda: [time.sleep(0.2), "bytes"][1]})
    clients = SlotClients(str(tmp_path), 1, timeout_s=0.1, is_alive=lambda: True)
    try:
        assert await clients.call("read", timeout_s=60) == ["bytes"]
    finally:
        clients.close()


async def test_the_death_of_the_engine_ends_a_call_at_once(tmp_path: Path):
    serve(tmp_path, 0, {"stall": lambda: threading.Event().wait(20)})
    clients = SlotClients(str(tmp_path), 1, timeout_s=20, is_alive=lambda: False)
    try:
        with pytest.raises(EngineDied, match="process died"):
            await clients.call("stall")
    finally:
        clients.close()


async def test_the_engine_gives_way_to_a_call_before_it_is_known_and_after_others(tmp_path: Path):
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        serve(tmp_path, 0, {"interval": sys.getswitchinterval})
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        clients = SlotClients(str(tmp_path), 1, timeout_s=10, is_alive=lambda: True)
        try:
            assert await clients.call("interval") == [pytest.approx(SWITCH_S)]
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        finally:
            clients.close()
    finally:
        sys.setswitchinterval(usual_s)
