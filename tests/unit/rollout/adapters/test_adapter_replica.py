"""What becomes of a group whose version a publish evicts, over an engine that samples from its seed alone; and what is
asked of an engine before its first adapter.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.conf.schema import PauseMode, SamplingConfig, SyncMode, WeightSyncConfig
from slipstream.rollout.adapters.adapter_replica import MAX_RESTARTS, AdapterReplica, kind_of, last_of_kind
from slipstream.rollout.errors import EngineDied, EngineError
from slipstream.rollout.types import ABORTED, Adapter, Rollout, Routes
from slipstream.weight_sync.calls.verbs import Verb
from slipstream.weight_sync.layout import Binding, DestLayout, Param
from slipstream.weight_sync.replica.messages import EngineRank
from slipstream.weight_sync.typed_msgpack import Sent

SAMPLING = SamplingConfig(max_tokens=12)
PROMPT = (1, 2, 3)


class SeededEngine:
    """Token i of a request is number i of its seed's stream. `evictions` says after how many tokens each is ended."""

    is_killed = False
    records_routes = False
    """If it does, every choice of a request is its number, from 1; without a token, vLLM returns none."""

    def __init__(self, evictions: list[int | None]) -> None:
        self.requests: list[tuple[list[int], int | None]] = []
        """Prompt and seed of each."""
        self._evictions = evictions

    def check(self) -> None:
        if self.is_killed:
            raise EngineDied("the engine's process was ended by SIGKILL")

    async def generate_group(
        self, prompt_token_ids: Any, n: int, sampling: SamplingConfig, *, seed: int | None, adapter: Adapter
    ) -> list[Rollout]:
        rollouts: list[Rollout] = []
        for index in range(n):
            own = None if seed is None else seed + index
            self.requests.append((list(prompt_token_ids), own))
            end = self._evictions.pop(0) if self._evictions else None
            stream = random.Random(own)
            count = sampling.max_tokens if end is None else end
            tokens = [stream.randrange(1000) for _ in range(count)]
            reason, num = "length" if end is None else ABORTED, len(prompt_token_ids) + count - 1
            routes = Routes(np.full((num, 2, 2), len(self.requests), np.uint8), np.full(num, count > 0))
            rollout = Rollout(tokens, [-1.0] * count, [adapter.version] * count, "", reason)
            rollouts.append(replace(rollout, routes=routes) if self.records_routes else rollout)
        return rollouts


def make(policy: PauseMode, evictions: list[int | None]) -> tuple[AdapterReplica, SeededEngine]:
    engine: Any = SeededEngine(evictions)
    config = WeightSyncConfig(mode=SyncMode.adapter, pause_mode=policy)
    replica = AdapterReplica(engine, [], [], 2, config, lambda: True)
    replica._table.commit(0, 7)
    return replica, engine


async def test_a_resumed_response_does_not_repeat_the_random_numbers_of_its_beginning() -> None:
    replica, engine = make(PauseMode.keep, [5, 4, None])
    (rollout,) = await replica.sample(PROMPT, 1, SAMPLING, seed=11)
    assert (len(rollout.token_ids), rollout.finish_reason, rollout.num_evictions) == (12, "length", 2)
    assert engine.requests[1][0] == [*PROMPT, *rollout.token_ids[:5]]
    assert engine.requests[2][0] == [*PROMPT, *rollout.token_ids[:9]]
    first, second, third = rollout.token_ids[:5], rollout.token_ids[5:9], rollout.token_ids[9:]
    assert second[:4] != first[:4]
    assert third[:3] not in (first[:3], second[:3])
    again, _ = make(PauseMode.keep, [5, 4, None])
    assert await again.sample(PROMPT, 1, SAMPLING, seed=11) == [rollout]
    unseeded, engine = make(PauseMode.keep, [5, None])
    await unseeded.sample(PROMPT, 1, SAMPLING, seed=None)
    assert [seed for _, seed in engine.requests] == [None, None]


async def test_a_resumed_response_keeps_the_routes_that_its_tokens_were_sampled_at() -> None:
    """Each request computes all positions before it anew: its number is in the routes that it returns."""
    replica, engine = make(PauseMode.keep, [5, 0, 4, None])
    engine.records_routes = True
    (rollout,) = await replica.sample(PROMPT, 1, SAMPLING, seed=11)
    assert rollout.routes is not None
    assert rollout.routes.experts[:, 0, 0].tolist() == [1] * 7 + [3] * 4 + [4] * 3  # 3 prompt tokens, then 5, 4 and 3
    assert rollout.routes.is_recorded.all()


async def test_evictions_are_counted_by_request_and_siblings_start_anew_together() -> None:
    replica, engine = make(PauseMode.abort, [5, None, 3])  # of three siblings one was done
    rollouts = await replica.sample(PROMPT, 3, SAMPLING, seed=11)
    assert [(len(rollout.token_ids), rollout.num_evictions) for rollout in rollouts] == [(12, 1), (12, 0), (12, 1)]
    assert replica.num_evicted_requests == 2
    assert engine.requests == [(list(PROMPT), seed) for seed in (11, 12, 13)] * 2


async def test_a_group_that_outlives_every_slot_ends_all_the_same() -> None:
    evictions = [5] * (1 + MAX_RESTARTS) + [1] * 7  # seven more tokens, one at a time
    replica, engine = make(PauseMode.abort, list(evictions))
    (rollout,) = await replica.sample(PROMPT, 1, SAMPLING, seed=11)
    assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.policy_versions) == 12
    assert rollout.finish_reason == "length"
    assert rollout.num_evictions == replica.num_evicted_requests == len(evictions)
    assert [len(prompt) for prompt, _ in engine.requests] == [3] * (1 + MAX_RESTARTS) + [8, 9, 10, 11, 12, 13, 14]


async def test_an_abort_that_nobody_asked_for_is_an_error() -> None:
    replica, _ = make(PauseMode.wait, [5])
    with pytest.raises(EngineError, match="although nobody asked it to"):
        await replica.sample(PROMPT, 1, SAMPLING, seed=11)


class ProbedEngine:
    """Slots that hold noise or nothing, and the kinds of module whose adapters act in each."""

    def __init__(self, acting: list[set[str]]) -> None:
        self.acting = acting
        self.holds = ["old"] * len(acting)

    async def call(self, verb: Verb, slot: int, noisy: Sequence[str], seed: int) -> None:
        assert verb.name == "fill" and len({kind_of(name) for name in noisy}) <= 1
        self.holds[slot] = kind_of(noisy[0]) if noisy else ""

    async def next_logprobs(self, token_ids: Any, adapter: Adapter) -> dict[int, float]:
        kind = self.holds[adapter.slot]
        return {1: -1.0 if kind in self.acting[adapter.slot] else -2.0}


BOTH = {"attention", "experts"}


@pytest.mark.parametrize(
    ("acting", "ignored"),
    [
        ([BOTH, BOTH, BOTH], None),
        ([BOTH, BOTH, {"attention"}], "experts in slot 2 of 3"),
        ([set(), BOTH], "attention, experts in slot 0 of 2"),
    ],
)
async def test_every_slot_is_asked_for_every_kind_of_module_at_every_publish_until_all_act(
    acting: list[set[str]], ignored: str | None
) -> None:
    engine: Any = ProbedEngine(acting)
    names = ("model.layers.0.self_attn.o_proj.lora_a.0", "model.layers.0.mlp.experts.w2_lora_a.0")
    layout = DestLayout(0, tuple(Param(name, (2,), "float32") for name in names), ())
    rank = EngineRank(Sent(layout), Binding("", {}), "tcp")
    replica = AdapterReplica(engine, [rank], [engine], len(acting), WeightSyncConfig(), lambda: True)
    if ignored is None:
        await replica._probe()
        assert engine.holds == ["", "", ""], "slots are left empty"
    for version in (1, 2) if ignored else ():
        with pytest.raises(EngineError, match=f"ignores adapters of {ignored}"):
            await replica.begin(version, version, "")


@pytest.mark.parametrize("was_killed", [False, True])
@pytest.mark.parametrize("policy", [PauseMode.wait, PauseMode.keep, PauseMode.abort])
async def test_responses_that_are_handed_over_are_returned_as_they_stand(policy: PauseMode, was_killed: bool) -> None:
    """No eviction, and no new try: another worker goes on."""
    replica, engine = make(policy, [5, None])
    replica.is_going, engine.is_killed = not was_killed, was_killed
    first, second = await replica.sample(PROMPT, 2, SAMPLING, seed=11)
    assert (len(first.token_ids), first.finish_reason, first.num_evictions) == (5, ABORTED, 0)
    assert (len(second.token_ids), second.finish_reason) == (12, "length")
    assert len(engine.requests) == 2
    assert replica.num_evicted_requests == 0


async def test_what_another_worker_handed_over_goes_on_under_the_newest_version() -> None:
    replica, engine = make(PauseMode.wait, [])
    begun = Rollout([1, 2], [-1.0, -1.0], [5, 6], "", ABORTED, num_evictions=1)
    (rollout,) = await replica.sample(PROMPT, 1, SAMPLING, seed=11, so_far=[begun])
    assert engine.requests[0][0] == [*PROMPT, 1, 2]
    assert rollout.policy_versions == [5, 6] + [7] * 10
    assert (rollout.token_ids[:2], rollout.finish_reason, rollout.num_evictions) == ([1, 2], "length", 1)


def test_noise_of_the_probe_is_in_the_last_layer_that_has_the_kind() -> None:
    names = {
        "model.layers.0.mlp.gate_up_proj.lora_a.0", "model.layers.0.self_attn.o_proj.lora_b.0",
        "model.layers.9.self_attn.o_proj.lora_b.0", "model.layers.9.mlp.experts.w2_lora_a.0",
        "model.layers.10.mlp.experts.w2_lora_a.0", "model.layers.10.mlp.experts.w2_lora_b.0",
        "model.layers.10.self_attn.o_proj.lora_b.0",
    }  # fmt: skip
    assert set(last_of_kind(names, "experts")) == {name for name in names if "layers.10.mlp.experts" in name}
    assert last_of_kind(names, "attention") == ["model.layers.10.self_attn.o_proj.lora_b.0"]
    assert last_of_kind(names, "feed-forward") == ["model.layers.0.mlp.gate_up_proj.lora_a.0"]
    assert last_of_kind(names, "") == []
