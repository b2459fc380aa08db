"""Recorded routes on CUDA: a real engine's, of every position of requests that are chunked, cached, preempted, frozen
by a publish or ended for their slot, against the choice of a real trainer with the weights that sampled each token.

The trainer and the engine share GPU 0. A route is right when it is the trainer's own choice, but for near-ties: of this
model's 28 pairs of experts, that of another position or version is rarely the same. One engine start per case.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cases.rank_helpers import draw, rank_of
from cases.route_cases import own_routes
from cases.samples import build_samples

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, RunConfig, SamplingConfig, SyncMode
from slipstream.orchestrator.cluster.rollout_workers import worker_options
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.orchestrator.loop.updates import denominators_of
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.types import Group, Prompt, Rollout
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.rank import TrainerRank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]

KEY = b"k" * 32
BLOCK = 16
"""Tokens of a block of vLLM's KV cache on a GPU."""
CACHE_TOKENS = 64 * BLOCK
PROMPT_TOKENS = 70
"""Four whole blocks, which siblings share, and more than a step takes: prompts are chunked."""
GROUP, LONG = 8, 200
"""64 + 8 (6 + 200) tokens do not fit into the cache: some of the group are preempted, and prefilled again."""
MIN_EQUAL, MIN_EQUAL_OF_A_BLOCK = 0.9, 0.6
"""Least share of routes that are the trainer's choice, over a response and over any 16 positions of it. On a CPU,
merged weights in bfloat16 instead of adapters beside them flip 2 to 3 % of this model's routes, at most 2 of any 16;
4 % of another version's routes are equal, and 30 % of the position before."""


@dataclass(frozen=True)
class World:
    """A trainer, and a worker that its publishes reach."""

    config: RunConfig
    trainer: TrainerRank
    worker: RolloutWorker

    async def publish(self, version: int) -> None:
        """New adapters, far from the ones before, in the engine."""
        draw(self.trainer, 1000 + version, std=0.3)
        report = await asyncio.to_thread(self.trainer.delivery.publish, version)
        assert report.replicas[0].error is None

    def choice(self, version: int, prompt: Prompt, rollout: Rollout) -> np.ndarray:
        """What the trainer's routers choose at every position with a route, under a version: [N, layers, K]."""
        draw(self.trainer, 1000 + version, std=0.3)
        ids = torch.tensor([*prompt.token_ids, *rollout.token_ids], device="cuda")
        with torch.no_grad(), own_routes(self.trainer.decoder) as layers:
            self.trainer.decoder(ids, torch.arange(len(ids), device="cuda"), torch.tensor([0, len(ids)]))
        return torch.stack(layers, dim=1)[:-1].cpu().numpy()


def config_of(mode: SyncMode, tp_size: int = 1) -> RunConfig:
    """A cache of 1,024 tokens (2 layers, 2 heads of keys and of values, 64 elements of 2 bytes: 1 KiB per token), steps
    of 64 tokens, CUDA graphs; several ranks of an engine split the experts."""
    return load_run_config(
        [
            "experiment=quickstart", "cluster.device=cuda", "trainer.ep_size=1", "trainer.num_ranks=1",
            "trainer.lora.rank=8", "trainer.lora.alpha=16", "model.dtype=bfloat16", "model.hf_config.hidden_size=256",
            "model.hf_config.head_dim=64", "model.hf_config.moe_intermediate_size=128", "rollout.max_model_len=512",
            "rollout.gpu_memory_utilization=0.3", f"rollout.kv_cache_bytes={CACHE_TOKENS * 1024 // tp_size}",
            f"rollout.tp_size={tp_size}", *["rollout.enable_expert_parallel=true"] * (tp_size > 1),
            "rollout.max_num_seqs=16", "rollout.max_num_batched_tokens=64", "parity.replay_routing=true",
            f"weight_sync.mode={mode}",
            "weight_sync.pause_mode=keep",
        ]
    )  # fmt: skip


@asynccontextmanager
async def started(folder: Path, mode: SyncMode, tp_size: int = 1) -> AsyncIterator[World]:
    config = config_of(mode, tp_size)
    model = prepare_model(config.model, folder)
    options = worker_options(config, model.hf_config, model.folder, Device.cuda, KEY)
    worker = RolloutWorker(options, seed=1, make_engine=VllmEngine)
    address = await worker.start()
    trainer = rank_of(config, KEY, hf_config=model.hf_config, device="cuda")
    try:
        trainer.load()
        adapters = [await worker.adapter_endpoint()] if mode is SyncMode.adapter else []
        await asyncio.to_thread(trainer.delivery.connect, [address], None, adapters)
        yield World(config, trainer, worker)
    finally:
        await worker.stop()
        trainer.shutdown()


def prompt_of(number: int) -> Prompt:
    rng = np.random.default_rng(number)
    return Prompt(number, tuple(int(token) for token in rng.integers(3, 63, PROMPT_TOKENS)), "")


def sampling(max_tokens: int) -> SamplingConfig:
    return SamplingConfig(max_tokens=max_tokens, stop_at_eos=False)


def equal_pairs(routes: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """[N]: share of a position's layers in which both name the same experts, in any order."""
    return (np.sort(routes, axis=-1) == np.sort(choice, axis=-1)).all(axis=-1).mean(axis=1)


def check(world: World, prompt: Prompt, rollouts: list[Rollout], what: str) -> None:
    """Every position has a route, and it is the choice of the version that sampled the token after it."""
    for rollout in rollouts:
        assert rollout.routes is not None and rollout.num_tokens_without_route == 0, what
        num_positions = len(prompt.token_ids) + len(rollout.token_ids) - 1
        assert rollout.routes.experts.shape[0] == num_positions and rollout.routes.is_recorded.all(), what
        # Position P - 1 + i led to response token i; the prompt was last filled for the first of them.
        versions = np.array([rollout.policy_versions[0]] * (len(prompt.token_ids) - 1) + rollout.policy_versions)
        wanted = np.zeros_like(rollout.routes.experts)
        for version in np.unique(versions):
            wanted[versions == version] = world.choice(int(version), prompt, rollout)[versions == version]
        equal = equal_pairs(rollout.routes.experts, wanted)
        blocks = np.convolve(equal, np.full(BLOCK, 1 / BLOCK), mode="valid")
        shifted = equal_pairs(rollout.routes.experts[1:], wanted[:-1]).mean()
        print(f"{what}: equal {equal.mean():.3f}, worst 16 {blocks.min():.3f}, one off {shifted:.3f}")
        assert equal.mean() >= MIN_EQUAL and blocks.min() >= MIN_EQUAL_OF_A_BLOCK and shifted < MIN_EQUAL, what


async def long_groups(world: World) -> None:
    """Chunked prompts; siblings that share blocks; preemption; a prompt whose blocks are all cached."""
    assert world.worker.engine.num_kv_blocks * BLOCK <= CACHE_TOKENS < 64 + GROUP * (6 + LONG)
    prompt = prompt_of(1)
    preempted = await world.worker.generate_group(prompt, GROUP, sampling(LONG), seed=5)
    check(world, prompt, preempted, "preempted")
    again = await world.worker.generate_group(prompt, 2, sampling(5), seed=6)
    check(world, prompt, again, "cached prompt")
    assert again[0].routes is not None and again[1].routes is not None
    shared = slice(0, PROMPT_TOKENS // BLOCK * BLOCK)  # both read the same blocks
    assert np.array_equal(again[0].routes.experts[shared], again[1].routes.experts[shared])
    one = await world.worker.generate_group(prompt, 1, sampling(1), seed=7)
    check(world, prompt, one, "one token")


def replay(world: World, prompt: Prompt, rollouts: list[Rollout], version: int) -> None:
    """What the controller makes of the group goes through the trainer, which would have chosen nearly all of it."""
    draw(world.trainer, 1000 + version, std=0.3)
    group = Group(prompt, rollouts, [float(i % 2) for i in range(len(rollouts))])
    samples = build_samples([group], world.config.algorithm)
    assert len(samples) == len(rollouts)
    counts = denominators_of(samples, world.trainer.policy_version, world.config.max_response_tokens)
    stats = world.trainer.forward_backward([samples], counts).sums
    flipped = stats["parity/num_flipped"] / stats["parity/num_routings"]
    print(f"flipped {flipped:.4f}")
    assert flipped < 1 - MIN_EQUAL


@pytest.fixture(autouse=True)
def spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # having asked for CUDA spoils a fork


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_route_of_merged_weights_is_the_choice_that_led_to_its_token(tmp_path: Path, tp_size: int) -> None:
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} GPUs")

    async def run() -> None:
        async with started(tmp_path, SyncMode.merged, tp_size) as world:
            await world.publish(0)
            await long_groups(world)
            prompt = prompt_of(2)
            done = world.worker.engine.num_generated_tokens
            task = asyncio.create_task(world.worker.generate_group(prompt, 4, sampling(LONG), seed=8))
            while world.worker.engine.num_generated_tokens < done + 4 * 20:
                await asyncio.sleep(0.002)
            await world.publish(1)  # frozen, its blocks dropped, prefilled again under the new weights
            spanning = await task
            assert any(rollout.policy_versions[0] != rollout.policy_versions[-1] for rollout in spanning)
            check(world, prompt, spanning, "spanning a publish")
            fresh = await world.worker.generate_group(prompt, 4, sampling(40), seed=9)
            assert {version for rollout in fresh for version in rollout.policy_versions} == {1}
            check(world, prompt, fresh, "after a publish")
            replay(world, prompt, [_as_of(rollout, 0) for rollout in fresh], 1)

    asyncio.run(run())


def _as_of(rollout: Rollout, version: int) -> Rollout:
    """The trainer of this test makes no steps: its version stays 0."""
    return Rollout(
        rollout.token_ids, rollout.logprobs, [version] * len(rollout.token_ids), "", "length", routes=rollout.routes
    )


def test_every_route_of_adapters_in_slots_is_the_choice_that_led_to_its_token(tmp_path: Path) -> None:
    """One slot serves while another is written: the second publish ends requests that read the first version."""

    async def run() -> None:
        async with started(tmp_path, SyncMode.adapter) as world:
            await world.publish(0)
            await long_groups(world)
            prompt = prompt_of(2)
            done = world.worker.engine.num_generated_tokens
            task = asyncio.create_task(world.worker.generate_group(prompt, 4, sampling(300), seed=8))
            while world.worker.engine.num_generated_tokens < done + 4 * 20:
                await asyncio.sleep(0.002)
            for version in (1, 2, 3):
                await world.publish(version)
            evicted = await task
            assert all(rollout.num_evictions for rollout in evicted)
            check(world, prompt, evicted, "evicted")

    asyncio.run(run())
