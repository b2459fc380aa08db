"""A keeper gives back what whole states it holds, two of a rank, and only to who knows the key."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection

import pytest

from slipstream.trainer.checkpoint import keeper as keeper_module
from slipstream.trainer.checkpoint.keeper import Keeper, Taking, hold, take

KEY = b"the run's key"


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper("127.0.0.1", KEY)
    yield made
    made.close()


def send(keeper: Keeper, number: int, *parts: bytes, rank: int = 0, life: int = 0) -> None:
    hold(keeper.address, KEY, rank, number, [memoryview(part) for part in parts], life)


@contextmanager
def half_a_state(keeper: Keeper, number: int) -> Iterator[tuple[Connection, socket.socket]]:
    """Three of five bytes have been sent, and what is older than the newest state is forgotten."""
    left = {0: [number - 1]}
    with Client(keeper.address, authkey=KEY) as connection:
        connection.send_bytes(b'{"verb": "hold", "rank": 0, "number": %d, "num_bytes": 5, "life": 0}' % number)
        with socket.socket(fileno=socket.dup(connection.fileno())) as sock:
            sock.sendall(b"new")
            deadline = time.monotonic() + 20
            while keeper.kept() != left and time.monotonic() < deadline:
                time.sleep(0.01)
            assert keeper.kept() == left
            yield connection, sock


def test_each_rank_gets_its_own_state_of_a_step_back(keeper: Keeper) -> None:
    large = bytes(range(256)) * 40_000  # more than a socket takes at once
    send(keeper, 1, b"head", b"", large)
    send(keeper, 1, b"another", rank=1)
    assert keeper.kept() == {0: [1], 1: [1]}
    assert take(keeper.address, KEY, 0, 1) == b"head" + large
    taking = Taking(keeper.address, KEY, 1, 1)
    assert (taking.of(keeper.address, 2), taking.of(keeper.address, 1)) == (None, b"another")


def test_a_state_stays_until_the_second_one_after_it_comes(keeper: Keeper) -> None:
    states = {1: b"state 1", 2: b"state 2", 3: b"state 3", 4: b"small", 5: b"state 5"}
    for number, state in states.items():
        send(keeper, number, state)
        held = {one: states[one] for one in (number - 1, number) if one}
        assert keeper.kept() == {0: list(held)}
        assert {one: take(keeper.address, KEY, 0, one) for one in held} == held


def test_a_step_that_is_computed_again_takes_the_place_of_its_state(keeper: Keeper) -> None:
    """The state before it stays: another rank may have no newer one."""
    for number in (1, 2):
        send(keeper, number, b"first %d" % number)
    send(keeper, 2, b"again 2")
    assert keeper.kept() == {0: [1, 2]}
    assert take(keeper.address, KEY, 0, 1) == b"first 1"
    assert take(keeper.address, KEY, 0, 2) == b"again 2"


def test_states_after_the_one_that_ranks_go_on_from_are_forgotten(keeper: Keeper) -> None:
    """Another rank may have none of that number, and the next of that number is of another step."""
    for rank, newest in ((0, 2), (1, 1)):
        for number in range(1, newest + 1):
            send(keeper, number, b"%d" % number, rank=rank)
    keeper.go_back(1, 1)
    assert keeper.kept() == {0: [1], 1: [1]}


def test_a_rank_that_was_given_up_and_comes_back_stores_nothing(keeper: Keeper) -> None:
    """Neither the rest of what it was sending, nor anything else."""
    for number in (1, 2):
        send(keeper, number, b"state")
    with half_a_state(keeper, 3) as (connection, sock):
        keeper.go_back(2, 1)
        send(keeper, 3, b"anew!", life=1)
        sock.sendall(b"er")
        with pytest.raises((EOFError, ConnectionError)):
            connection.recv_bytes()
    with pytest.raises(OSError):
        send(keeper, 4, b"stale")
    assert keeper.kept() == {0: [2, 3]}
    assert take(keeper.address, KEY, 0, 3) == b"anew!"


def test_a_state_that_broke_off_does_not_count_and_the_one_before_it_stays(keeper: Keeper) -> None:
    send(keeper, 1, b"whole")
    send(keeper, 2, b"old 2")
    with half_a_state(keeper, 3):
        pass
    assert keeper.kept() == {0: [2]}
    with pytest.raises(OSError, match="broke off"):
        take(keeper.address, KEY, 0, 3)


def test_who_does_not_know_the_key_gets_nothing_and_stores_nothing(keeper: Keeper) -> None:
    send(keeper, 1, b"secret")
    with pytest.raises(OSError, match=r"the keeper at 127\.0\.0\.1:\d+ broke off \(AuthenticationError\)"):
        take(keeper.address, b"another key", 0, 1)
    with pytest.raises(OSError):
        hold(keeper.address, b"another key", 0, 2, [memoryview(b"forged")], 0)
    with socket.create_connection(keeper.address) as silent:  # whoever says nothing keeps nobody from being served
        assert take(keeper.address, KEY, 0, 1) == b"secret"
        silent.sendall(b"\0\0\0\x04junk")
    assert keeper.kept() == {0: [1]}


def test_a_keeper_that_is_silent_or_gone_is_an_error_and_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "SILENCE_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                hold((host, port), KEY, 0, 1, [memoryview(b"state")], 0)
            except OSError as error:
                failed.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(30)
        assert len(failed) == 1
    with pytest.raises(OSError):
        take((host, port), KEY, 0, 1)
