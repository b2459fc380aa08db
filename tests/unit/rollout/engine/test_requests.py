"""Requests, version stamps and calls to the ranks of VllmEngine, over a client that answers as vLLM's does. What vLLM
itself makes of them is shown by tests/contract/test_engine_vllm.py.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineGenerateError

from slipstream.conf.schema import SamplingConfig
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.errors import EngineError
from slipstream.rollout.types import Adapter
from slipstream.weight_sync.errors import IntegrityError

SAMPLING = SamplingConfig(max_tokens=4)


class Client:
    """Requests wait until `ends` has their last output."""

    errored = False
    output_processor = SimpleNamespace(external_req_ids={})

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue[str]())
        self.seeds: dict[str, int | None] = {}
        self.salts: dict[str, str] = {}
        self.ends: dict[str, asyncio.Future[object]] = {}
        self.left: list[str] = []
        self.aborted: list[str] = []
        self.replies: list[tuple[str, str, object]] = []
        """What each rank answers to a call: the error's class, its text, and the result."""

    async def generate(
        self, prompt: Mapping[str, str], params: Any, request: str, *, lora_request: object
    ) -> AsyncIterator[object]:
        self.seeds[request], self.salts[request] = params.seed, prompt["cache_salt"]
        self.ends[request] = asyncio.get_running_loop().create_future()
        try:
            yield await self.ends[request]
        finally:
            self.left.append(request)

    async def abort(self, requests: Sequence[str]) -> None:
        self.aborted += requests

    async def collective_rpc(self, method: str, *, args: tuple[object, ...]) -> list[tuple[str, str, object]]:
        return self.replies

    async def has(self, num_requests: int) -> None:
        while len(self.ends) < num_requests:
            await asyncio.sleep(0)


@pytest.fixture
async def client() -> Client:
    return Client()


@pytest.fixture
def engine(engine_of: Callable[..., VllmEngine], client: Client) -> VllmEngine:
    return engine_of(client)


async def test_siblings_have_seeds_of_their_own_and_end_where_one_fails(engine: VllmEngine, client: Client) -> None:
    group = asyncio.create_task(engine.generate_group([1, 2], 3, SAMPLING, seed=5))
    await client.has(3)
    assert client.seeds == {"rollout-0": 5, "rollout-1": 6, "rollout-2": 7}
    failed = EngineGenerateError()  # as vLLM raises it, without a word of its own
    failed.__cause__ = RuntimeError("can't start new thread")
    client.ends["rollout-1"].set_exception(failed)
    with pytest.raises(EngineError, match="4 new tokens: RuntimeError: can't start new thread"):
        async with asyncio.timeout(60):  # or the others go on without an end
            await group
    assert sorted(client.left) == ["rollout-0", "rollout-1", "rollout-2"]


async def test_a_request_has_the_version_of_its_adapter_in_its_stamps_in_its_salt_and_where_it_is_ended(
    engine: VllmEngine, client: Client
) -> None:
    engine.version = 3
    groups = [
        asyncio.create_task(engine.generate_group([1, 2], 1, SAMPLING, adapter=adapter))
        for adapter in (None, Adapter(0, 7), Adapter(1, 8))
    ]
    await client.has(3)
    assert list(client.salts.values()) == ["policy version 3", "policy version 7", "policy version 8"]
    await engine.abort_version(8)
    assert client.aborted == ["rollout-2"]
    for request, end in client.ends.items():
        engine._stamp(SimpleNamespace(request_id=f"{request}-1a2b3c4d", new_token_ids=[5], finish_reason="stop"))
        said = SimpleNamespace(token_ids=[5], logprobs=[-1.0])
        output = SimpleNamespace(token_ids=[5], logprobs=said, finish_reason="stop", stop_reason=None)
        end.set_result(SimpleNamespace(outputs=[output]))
    assert [rollout.policy_versions for group in groups for rollout in await group] == [[3], [7], [8]]
    assert (engine.num_generated_tokens, engine.num_finished_responses) == (3, 3)


async def test_the_version_moves_once_all_outputs_of_the_one_before_are_stamped(
    engine: VllmEngine, client: Client
) -> None:
    client.engine_core.outputs_queue.put_nowait("of the version before")
    moves = asyncio.create_task(engine.set_version(4))
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.version == -1
    client.engine_core.outputs_queue.get_nowait()
    await moves
    assert engine.version == 4


@pytest.mark.parametrize("refusing", [0, 1, 2])
async def test_a_call_fails_when_any_rank_does(engine: VllmEngine, client: Client, refusing: int) -> None:
    client.replies = [("", "", rank) for rank in range(3)]
    assert await engine.call_ranks("slipstream_verify") == [0, 1, 2]
    client.replies[refusing] = ("IntegrityError", f"of rank {refusing}", None)
    with pytest.raises(IntegrityError, match=f"of rank {refusing}"):
        await engine.call_ranks("slipstream_verify")
