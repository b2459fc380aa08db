"""Whatever a row may hold arrives at the user's code as it was; what is no message ends the connection. The same at an
end that blocks.
"""

import socket
import threading
from typing import Any

import pytest

from slipstream.rollout.channel import LENGTH, BlockingChannel, Channel, Disconnected, Garbled


async def both_ends(max_bytes: int = 1 << 20) -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return await Channel.over(ours, max_bytes=max_bytes), await Channel.over(theirs)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -1,
        1 << 64,
        -(10**300),
        0.1,
        float("inf"),
        "\ud800 a lone surrogate",
        b"\xff",
        {"a": [1, {"b": None}]},
    ],
)
async def test_values_arrive_as_they_were(value: Any) -> None:
    here, there = await both_ends()
    here.send([7, value])
    assert await there.receive() == [7, value]
    here.close()
    with pytest.raises(Disconnected):
        await there.receive()
    here, there = map(BlockingChannel, socket.socketpair())
    assert not there.hears(0)
    here.send([7, value])
    assert there.hears(0) and there.receive() == [7, value]
    here.close()
    assert there.hears(0)
    with pytest.raises(Disconnected):
        there.receive()


def test_an_end_that_blocks_sends_and_receives_more_than_a_socket_holds() -> None:
    here, there = map(BlockingChannel, socket.socketpair())
    sending = threading.Thread(target=here.send, args=(["x" * (8 << 20)],), daemon=True)
    sending.start()
    assert there.receive() == ["x" * (8 << 20)]
    sending.join(60)
    there.close()
    here.send(["nobody reads it"])
    with pytest.raises(Disconnected):
        here.receive()


async def test_what_no_message_can_hold_is_refused_where_it_is_sent() -> None:
    here, _ = await both_ends()
    with pytest.raises(TypeError, match="a message cannot hold object"):
        here.send([object()])


async def test_a_message_that_is_too_long_is_not_read() -> None:
    here, there = await both_ends(max_bytes=100)
    there.send(["x" * 97])  # with two bytes before the text, and one before the list
    assert await here.receive() == ["x" * 97]
    there.send(["x" * 100])
    with pytest.raises(Garbled, match="a message of 103 bytes was announced; 100 are allowed"):
        await here.receive()


@pytest.mark.parametrize("payload", [b"\xc1", b"\x92\x01", b"\x01\x01", b"\xc7\x01\x09x"])
async def test_bytes_that_are_no_message_are_told_from_an_end(payload: bytes) -> None:
    ours, theirs = socket.socketpair()
    here = await Channel.over(ours)
    theirs.sendall(LENGTH.pack(len(payload)) + payload)
    with pytest.raises(Garbled, match="bytes that are no message"):
        await here.receive()
    ours, theirs = socket.socketpair()
    theirs.sendall(LENGTH.pack(len(payload)) + payload)
    with pytest.raises(Garbled, match="bytes that are no message"):
        BlockingChannel(ours).receive()
