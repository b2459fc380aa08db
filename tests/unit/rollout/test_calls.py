"""Calls over the real socket: what is given, returned or raised at one end comes out at the other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq

from slipstream.conf.schema import EvalSampling, EvalSamplingConfig, SamplingConfig
from slipstream.rollout.errors import EngineDied, EngineError, ReplicaNotServing
from slipstream.rollout.types import Prompt, Rollout, Routes
from slipstream.rollout.worker_verbs import WorkerClient, WorkerVerbs
from slipstream.weight_sync.calls import server as calls
from slipstream.weight_sync.calls.connection import HEARTBEAT_S, SILENCE_S
from slipstream.weight_sync.calls.server import CallServer
from slipstream.weight_sync.calls.verbs import Verb
from slipstream.weight_sync.errors import ProtocolError
from slipstream.weight_sync.layout import Binding
from slipstream.weight_sync.replica.recovery import Offer, Pulled

KEY = b"k" * 32
PROMPT = Prompt(7, (3, 151_000, 5), "k 3 a =", {"answer": object()})
"""With a field that no message could carry: the worker needs none."""
TIMEOUT_S = 20.0


OFFER = Offer(3, 1, "plan", "layout", "tcp", Binding("here:1", {"w": 1 << 47}), {"w": (1 << 64) - 1})


class Worker:
    """Samples what it is told to, and keeps what it was asked. It has a method that is no verb."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.sampled: Any = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        self.asked.append((offers,))
        return Pulled(7, 1.0, 0.5)

    async def progress(self) -> Any:
        return "as far as ever"

    async def secret(self) -> str:
        return "not to be told"

    async def generate_group(
        self,
        prompt: Prompt,
        n: int,
        sampling: SamplingConfig | None = None,
        version: int | None = None,
        so_far: Sequence[Rollout] = (),
    ) -> list[Rollout]:
        self.so_far = so_far
        self.asked.append((prompt.prompt_id, prompt.token_ids, n, sampling, version))
        await self.may_answer.wait()
        if isinstance(self.sampled, BaseException):
            raise self.sampled
        return self.sampled


@pytest.fixture
async def worker() -> Worker:
    return Worker()


@pytest.fixture
async def server(worker: Worker) -> AsyncIterator[CallServer]:
    server = CallServer(worker, WorkerVerbs, KEY)
    await server.start()
    yield server
    server.close()


@pytest.fixture
async def client(server: CallServer) -> AsyncIterator[WorkerClient]:
    client = WorkerClient.at(server.address, KEY)
    yield client
    client.connection.close()


async def asked(worker: Worker, client: WorkerClient) -> asyncio.Task[list[Rollout]]:
    """A request that the worker has, and does not answer."""
    worker.may_answer.clear()
    waits = asyncio.create_task(ask(client))
    while not worker.asked:
        await asyncio.sleep(0.01)
    return waits


async def ask(client: WorkerClient, *, n: int = 1, sampling: SamplingConfig | None = None) -> list[Rollout]:
    return await asyncio.wait_for(client.generate_group(PROMPT, n, sampling, None), TIMEOUT_S)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.7, max_tokens=9, stop=("</a>",), stop_token_ids=(3,), seed=11),
        EvalSampling(max_tokens=9, drawing=EvalSamplingConfig(temperature=0.5, top_p=0.9, top_k=3)),
        None,
    ],
)
async def test_what_is_asked_for_and_what_was_sampled_arrive_as_they_were(
    worker: Worker, client: WorkerClient, sampling: SamplingConfig | None
) -> None:
    plain = Rollout([1, 151_935], [-0.1, -1e-17], [4, 5], "a</s>\u00e9", "stop", num_evictions=2)
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2) * 30
    routed = Rollout([9], [-2.5], [5], "", "abort", routes=Routes(experts, np.array([True, False])))
    worker.sampled = [plain, routed]
    sampled = await asyncio.wait_for(client.generate_group(PROMPT, 2, sampling, None, [plain, routed]), TIMEOUT_S)
    assert worker.asked == [(7, (3, 151_000, 5), 2, sampling, None)]
    for first, second in (sampled, worker.so_far):
        assert first == plain and replace(second, routes=None) == replace(routed, routes=None)
        assert second.routes is not None and second.routes.is_recorded.tolist() == [True, False]
        assert second.routes.experts.dtype == np.int16 and np.array_equal(second.routes.experts, experts)
        assert second.routes.experts.flags.writeable


async def test_every_declared_verb_can_be_sent_and_nothing_else(worker: Worker, client: WorkerClient) -> None:
    assert await client.pull([OFFER]) == Pulled(7, 1.0, 0.5)
    assert worker.asked == [([OFFER],)]
    undeclared = Verb(Worker.secret)
    with pytest.raises(EngineError, match="secret failed with KeyError"):
        await client.connection.call(undeclared)
    with pytest.raises(EngineError, match="pull failed with ValidationError: Expected `object`, got `int`"):
        await client.pull([3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(EngineError, match="progress was answered with something else"):
        await client.progress()
    with pytest.raises(TypeError):
        await client.adopt(3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("told", [EngineDied("process 7 was ended by SIGKILL"), ValueError("of somebody's own"), None])
@pytest.mark.parametrize("breaks_first", [False, True])
async def test_calls_fail_with_what_is_said_of_the_end(
    worker: Worker, server: CallServer, told: Exception | None, breaks_first: bool
) -> None:
    """Whoever watches the process may learn of its end after its socket is gone, or have no word of it."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    client = WorkerClient.at(server.address, KEY, ended)
    waits = await asked(worker, client)
    if breaks_first:
        server.close()
        await asyncio.sleep(0.2)
    ended.set_result(None) if told is None else ended.set_exception(told)
    said = str(told) if isinstance(told, EngineDied) else f"at {server.address} is gone"
    for call in (waits, ask(client)):
        with pytest.raises(EngineDied, match=said):
            await call


async def test_a_connection_that_is_closed_lets_go_of_who_watches_and_of_every_call(
    worker: Worker, server: CallServer
) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    client = WorkerClient.at(server.address, KEY, ended)
    assert await ask(client) == [] and not client.connection._pending
    worker.may_answer.clear()
    given_up, waits = (asyncio.create_task(client.generate_group(PROMPT, 1)) for _ in range(2))
    while len(worker.asked) < 3:
        await asyncio.sleep(0.01)
    given_up.cancel()
    for _ in range(2):
        client.connection.close()
    with pytest.raises(EngineDied, match="is closed"):
        await waits
    assert ended.cancelled()
    with pytest.raises(EngineDied, match="is closed"):
        await ask(client)


async def test_what_a_verb_has_defaults_for_may_be_left_out_or_named(worker: Worker, client: WorkerClient) -> None:
    sampling = SamplingConfig(temperature=0.5)
    assert await client.generate_group(PROMPT, 2) == await client.generate_group(PROMPT, n=3, version=4) == []
    assert await client.generate_group(n=1, sampling=sampling, prompt=PROMPT) == []
    given = (7, (3, 151_000, 5))
    assert worker.asked == [(*given, 2, None, None), (*given, 3, None, 4), (*given, 1, sampling, None)]


async def test_no_socket_drops_or_keeps_messages_and_silence_is_noticed(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(calls, "serve_guarded", lambda socket, key: made.append(socket))
    await (server := CallServer(Worker(), WorkerVerbs, KEY)).start()
    for socket in (client.connection._socket, *made):
        assert [socket.getsockopt(option) for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM)] == [0, 0, 0]
    assert len(made) == 1 and server.address.startswith("tcp://127.0.0.1:")
    server.close()
    in_ms = [client.connection._socket.getsockopt(option) for option in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT)]
    assert in_ms == [1000 * HEARTBEAT_S, 1000 * SILENCE_S] and HEARTBEAT_S < SILENCE_S


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (ReplicaNotServing("this rollout worker is DIRTY"), ReplicaNotServing, "this rollout worker is DIRTY"),
        (EngineDied("the engine's process has ended"), EngineDied, "the engine's process has ended"),
        (KeyError("no such thing"), EngineError, "generate_group failed with KeyError: 'no such thing'"),
        (EngineError("no file /a\udcff"), EngineError, "no file /a?"),
        (asyncio.CancelledError("underneath"), EngineError, "generate_group failed with CancelledError: underneath"),
    ],
)
async def test_errors_are_raised_again(
    worker: Worker, client: WorkerClient, raised: BaseException, kind: type[Exception], text: str
) -> None:
    worker.sampled = raised
    with pytest.raises(kind) as caught:
        await ask(client)
    assert type(caught.value) is kind
    assert str(caught.value) == text
    worker.sampled = []
    assert await ask(client) == []


async def test_requests_overlap_and_one_that_nobody_waits_for_disturbs_no_other(
    worker: Worker, client: WorkerClient
) -> None:
    worker.may_answer.clear()
    given_up, waits = (asyncio.create_task(ask(client)) for _ in range(2))
    while len(worker.asked) < 2:
        await asyncio.sleep(0.01)
    given_up.cancel()
    worker.may_answer.set()
    assert await waits == []
    assert await ask(client) == []


async def test_a_closed_server_fails_the_requests_of_its_clients_and_later_ones(
    worker: Worker, server: CallServer, client: WorkerClient
) -> None:
    waits = await asked(worker, client)
    under_way = list(server._asked)
    server.close()
    for call in (waits, ask(client), ask(WorkerClient.at(server.address, KEY))):
        with pytest.raises(EngineDied, match="is closed"):
            await call
    assert [task.cancelled() for task in under_way] == [True], "the worker does not go on with it"


async def test_what_a_client_asked_is_given_up_when_another_one_comes_in_its_place(
    worker: Worker, server: CallServer, client: WorkerClient, caplog: pytest.LogCaptureFixture
) -> None:
    waits = await asked(worker, client)
    given_up = list(server._asked)
    came: list[int] = []
    server._another_came = lambda: came.append(len(worker.asked))
    another = WorkerClient.at(server.address, KEY)
    worker.may_answer = asyncio.Event()
    worker.may_answer.set()
    worker.sampled = [Rollout([1], [-0.5], [1], "a", "stop")]
    assert await ask(another) == worker.sampled
    assert [task.cancelled() for task in given_up] == [True] and not waits.done() and not caplog.records
    assert await ask(another) == worker.sampled
    assert came == [1], "once, and before what the other one asks is answered"
    waits.cancel()
    another.connection.close()


async def test_an_address_that_cannot_be_bound_and_a_short_key_are_named() -> None:
    server = CallServer(Worker(), WorkerVerbs, KEY, host="192.0.2.1")
    with pytest.raises(ProtocolError, match=r"cannot bind tcp://192\.0\.2\.1: "):
        await server.start()
    with pytest.raises(ProtocolError, match="the run's key must have at least 16 bytes, got 5"):
        await CallServer(Worker(), WorkerVerbs, b"short").start()
