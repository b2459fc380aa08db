"""A real rollout worker (vLLM, Mooncake over TCP, ZMQ) fed by a real publisher, against two oracles: transformers'
forward pass, and vLLM's own loader.

One worker serves all tests of this file, in order; each publishes what it needs. Checkpoints differ in every tensor,
and weights are drawn at a standard deviation of 0.1, so that log-probabilities of two versions are far apart.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import torch
from fakes.one_worker import EOS, MAX_LOGPROB_ERROR, Checkpoints, Served, one_worker
from fakes.readable_engine import ReadableEngine
from fakes.vllm_oracle import vllm_loads

from slipstream.conf.schema import PauseMode, RolloutConfig, RunConfig, SamplingConfig
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.branches import branches_of
from slipstream.rollout.engine.start_log import CONFIG, OutputSince, phase_in
from slipstream.rollout.errors import EngineDied, EngineError
from slipstream.rollout.in_vllm import vllm_patches
from slipstream.rollout.in_vllm.vllm_patches import spread
from slipstream.rollout.types import ABORTED, Prompt, Rollout
from slipstream.weight_sync.publish.report import PublishReport

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

LONG = 200
"""Tokens of a response that is still under way while a publish runs: four seconds of a slow engine."""
TURN = 200
"""Tokens of a turn of an episode. Three turns, and what is between them, fit into the longest sequence."""
PROMPT_TOKENS = 150
"""More than one block of the CPU engine's KV cache (128 tokens), so that a prefix can be reused at all."""


@dataclass(kw_only=True)
class Setup(Served):
    """With what was seen of its start."""

    temporary: Path
    """Where this process and its engine put temporary files."""
    said: str
    """What the engine wrote while it started, where pytest captures it."""
    last_phase: str
    """The last phase of the start that the engine told."""

    @property
    def engine(self) -> ReadableEngine:
        """The worker's."""
        assert isinstance(self.worker.engine, ReadableEngine)
        return self.worker.engine

    async def publish(self, version: int) -> PublishReport:
        """Publish the weights of `version`; what is under way goes on at full speed."""
        report = await super().publish(version)
        await self.engine.be_slow(False)
        return report

    async def start_long(
        self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None
    ) -> asyncio.Task[list[Rollout]]:
        """A group that is being sampled when this returns, by an engine that is slow until the next publish."""
        await self.engine.be_slow()
        before = self.worker.engine.num_generated_tokens
        sampling = sampling or SamplingConfig(max_tokens=LONG, stop_at_eos=False)
        group = asyncio.create_task(self.worker.generate_group(prompt, n, sampling=sampling))
        while self.worker.engine.num_generated_tokens < before + 20:
            await asyncio.sleep(0.005)
        return group


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    folder = tmp_path_factory.mktemp("engine")
    everybodys, tempfile.tempdir = tempfile.gettempdir(), tempfile.mkdtemp(prefix="t")  # short: for sockets
    temporary = Path(tempfile.gettempdir())
    config = RolloutConfig(
        max_model_len=1024, max_num_seqs=32, kv_cache_bytes=64 << 20, sampling=SamplingConfig(max_tokens=16)
    )
    output = OutputSince()
    try:
        async with one_worker(folder, Checkpoints(folder), config) as served:
            seen = {"temporary": temporary, "said": output.read(), "last_phase": served.worker.engine.start_phase}
            made = Setup(**vars(served), **seen)
            report = await made.publish(0)
            assert report.replicas[0].error is None
            yield made
    finally:
        tempfile.tempdir = everybodys
        shutil.rmtree(temporary)


@pytest.fixture
def keep_sync(setup: Setup) -> Iterator[None]:
    """The worker has its options again after the test."""
    before = setup.worker.base.config
    yield
    setup.worker.base.config = before


def prompt(seed: int) -> Prompt:
    """A random prompt that fills more than one KV block."""
    generator = torch.Generator().manual_seed(seed)
    return Prompt(seed, tuple(torch.randint(3, 64, (PROMPT_TOKENS,), generator=generator).tolist()), "")


def assert_sampled_by(setup: Setup, asked: Prompt, rollout: Rollout) -> None:
    """Every token's log-probability is the one of the version on its stamp, and of no other version that was served."""
    versions = torch.tensor(rollout.policy_versions)
    got = torch.tensor(rollout.logprobs)
    for version in versions.unique().tolist():
        mine = versions == version
        expected = setup.checkpoints.logprobs(version, asked, rollout)
        torch.testing.assert_close(got[mine], expected[mine], atol=MAX_LOGPROB_ERROR, rtol=0)
        others = (got - expected)[~mine].abs()
        assert others.numel() == 0 or others.max() > 100 * MAX_LOGPROB_ERROR


def assert_turns_sampled_by(
    setup: Setup, task: Prompt, rollout: Rollout, given: list[tuple[int, ...]], *, only_beginnings: bool
) -> None:
    """Turn k is of the versions k and k + 1, and what is trained is what the engine was given and sampled."""
    (branch,) = branches_of(task, rollout)
    assert len(given) == 3
    assert branch.policy_versions == rollout.policy_versions == sorted(rollout.policy_versions)
    for number, before in enumerate(given):
        tokens, sampled = slice(len(before), len(before) + TURN), slice(number * TURN, (number + 1) * TURN)
        ids, logprobs, versions = branch.token_ids[tokens], branch.logprobs[tokens], rollout.policy_versions[sampled]
        assert branch.token_ids[: len(before)] == list(before)
        assert branch.counts[tokens] == [True] * TURN
        assert ids == rollout.token_ids[sampled]
        assert set(versions) == {number, number + 1}
        end = versions.count(number) if only_beginnings else TURN
        turn = Rollout(ids[:end], logprobs[:end], versions[:end], "", "length")
        assert_sampled_by(setup, Prompt(0, before, ""), turn)


async def test_progress_counts_tokens_as_they_come_and_responses_as_they_end(setup: Setup) -> None:
    before = await setup.worker.progress()
    group = await setup.start_long(prompt(0), 2)
    meanwhile = await setup.worker.progress()
    await setup.engine.be_slow(False)
    await group
    after = await setup.worker.progress()
    assert meanwhile.num_finished == before.num_finished
    assert after.num_finished == before.num_finished + 2
    assert before.num_tokens + 20 <= meanwhile.num_tokens < after.num_tokens == before.num_tokens + 2 * LONG


async def test_an_engine_writes_the_lines_that_begin_the_phases_of_its_start(setup: Setup):
    lines = setup.said.splitlines()
    phases = [phase_in("\n".join(lines[:num])) for num in range(len(lines) + 1)]
    assert list(dict.fromkeys(phases)) == [  # a CPU's engine compiles, measures and captures nothing
        CONFIG,
        "starting the engine's process",
        "preparing the device",
        "building the model",
        "answering",
    ]
    assert setup.last_phase == "answering"


async def test_logprobs_and_stamps_are_those_of_the_published_weights(setup: Setup):
    await setup.publish(0)
    for temperature in (1.0, 0.7):
        rollouts = await setup.worker.generate_group(
            prompt(1), 4, sampling=SamplingConfig(max_tokens=32, temperature=temperature, stop_at_eos=False), seed=5
        )
        assert [len(rollout.token_ids) for rollout in rollouts] == [32] * 4
        assert {rollout.finish_reason for rollout in rollouts} == {"length"}
        assert len({tuple(rollout.token_ids) for rollout in rollouts}) == 4, "siblings must differ"
        if temperature == 1.0:
            for rollout in rollouts:
                assert set(rollout.policy_versions) == {0}
                assert_sampled_by(setup, prompt(1), rollout)


async def test_the_engine_sends_log_probabilities_of_a_step_together(setup: Setup, monkeypatch: pytest.MonkeyPatch):
    sent: list[list[LogprobsLists]] = []

    def seen(outputs: list[EngineCoreOutput]) -> None:
        sent.append([output.new_logprobs for output in outputs if output.new_logprobs is not None])
        spread(outputs)

    monkeypatch.setattr(vllm_patches, "spread", seen)
    group = await setup.worker.generate_group(prompt(2), 4, sampling=SamplingConfig(max_tokens=8, stop_at_eos=False))
    assert all(len(rollout.logprobs) == 8 for rollout in group)
    assert 0 < len(sent) <= 4 * 8
    assert all(len(lists) == 1 for lists in sent)
    assert sum(len(lists[0].logprobs) for lists in sent) == 4 * 8


async def test_prefill_scores_what_was_sampled_and_only_under_its_version(setup: Setup):
    """Twice: the second time every block of the sequence is cached, and must not be read."""
    await setup.publish(0)
    sampling = SamplingConfig(max_tokens=32, stop_at_eos=False)
    (rollout,) = await setup.worker.generate_group(prompt(1), 1, sampling=sampling, seed=7)
    sequence = [*prompt(1).token_ids, *rollout.token_ids]
    for _ in range(2):
        scored = await setup.worker.score(sequence, version=0)
        assert scored is not None and len(scored) == len(sequence) - 1
        assert scored[-32:] == pytest.approx(rollout.logprobs, abs=MAX_LOGPROB_ERROR)
    assert await setup.worker.score(sequence, version=1) is None
    with pytest.raises(EngineError):
        await setup.worker.score([5] * 2000, version=0)


async def test_a_response_ends_with_the_end_of_sequence_token(setup: Setup):
    await setup.publish(0)
    rollouts = await setup.worker.generate_group(prompt(3), 16, sampling=SamplingConfig(max_tokens=400), seed=1)
    stopped = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    assert stopped, "with 64 words and 400 tokens nearly every response meets the end"
    for rollout in stopped:
        assert rollout.token_ids[-1] == EOS
        assert EOS not in rollout.token_ids[:-1]
        assert len(rollout.logprobs) == len(rollout.policy_versions) == len(rollout.token_ids)


async def test_after_a_publish_every_parameter_is_what_vllms_own_loader_makes(setup: Setup):
    await setup.worker.engine.call_ranks("zero_params")
    report = await setup.publish(1)
    assert report.replicas[0].committed
    (ours,) = await setup.worker.engine.call_ranks("read_params")
    assert ours == await asyncio.to_thread(vllm_loads, setup.checkpoints.saved(1), "float32")
    assert any(name.endswith("w13_weight") for name in ours)


async def test_requests_in_flight_cross_a_publish_and_every_token_tells_its_version(setup: Setup):
    """Requests frozen by the publish go on under the new weights, prefilled anew: each token is its version's."""
    await setup.publish(0)
    group = await setup.start_long(prompt(4), 2)
    assert (await setup.publish(1)).replicas[0].committed
    for rollout in await group:
        assert len(rollout.token_ids) == LONG
        assert sorted(set(rollout.policy_versions)) == [0, 1]
        assert rollout.policy_versions == sorted(rollout.policy_versions)
        assert_sampled_by(setup, prompt(4), rollout)


async def test_a_prefix_of_older_weights_is_never_reused(setup: Setup):
    for version in (0, 1, 0):
        await setup.publish(version)
        for _ in range(2):  # the second time the prefix of this version is reused
            (rollout,) = await setup.worker.generate_group(prompt(5), 1)
            assert set(rollout.policy_versions) == {version}
            assert_sampled_by(setup, prompt(5), rollout)


async def test_kept_kv_entries_do_not_reach_requests_of_a_newer_version(setup: Setup, keep_sync: None):
    """With keep_kv the cache is not cleared, and requests in flight use it on; later requests must not."""
    setup.worker.base.config = dataclasses.replace(setup.worker.base.config, pause_mode=PauseMode.keep_kv)
    await setup.publish(0)
    group = await setup.start_long(prompt(6), 1)
    await setup.publish(1)
    (later,) = await setup.worker.generate_group(prompt(6), 1)
    assert_sampled_by(setup, prompt(6), later)
    (crossing,) = await group
    assert sorted(set(crossing.policy_versions)) == [0, 1]


async def test_an_episode_crosses_a_publish_in_each_of_its_turns(setup: Setup, keep_sync: None, tmp_path: Path):
    """Each turn is given the tokens of all before it, which other versions sampled: blocks of the KV cache that they
    left must not be read. With keep_kv the rest of a turn reads the older version's, so only its beginning is compared.
    """
    given: list[tuple[int, ...]] = []

    async def generate(asked: Prompt, sampling: SamplingConfig) -> Rollout:
        given.append(asked.token_ids)
        turn = await setup.start_long(asked, 1, sampling)
        await setup.publish(len(given))
        (rollout,) = await turn
        return rollout

    sampling = SamplingConfig(max_tokens=TURN, stop_at_eos=False)
    config = RunConfig(
        rollout=RolloutConfig(
            agent="slipstream.rollout.agents.games.letters:play", sampling=sampling, max_model_len=1024
        )
    )
    task = Prompt(0, (), "4b7=", {"lines": ["4b7=", "d01=", "88k="]})
    runner = EpisodeRunner(config, setup.checkpoints.folder / "model", log_path=tmp_path / "agents.log")
    try:
        await runner.start()
        runner.sample_with(generate)
        for keeps_kv in (False, True):
            setup.worker.base.config = dataclasses.replace(
                setup.worker.base.config, pause_mode=PauseMode.keep_kv if keeps_kv else PauseMode.keep
            )
            await setup.publish(0)
            given.clear()
            (episode,) = await runner.run_group(task, 1)
            assert episode.rollout.failure == ""
            assert_turns_sampled_by(setup, task, episode.rollout, given, only_beginnings=keeps_kv)
    finally:
        await runner.close()


@pytest.mark.parametrize("mode", [PauseMode.wait, PauseMode.abort])
async def test_other_pause_modes_give_groups_of_one_version(setup: Setup, keep_sync: None, mode: PauseMode):
    setup.worker.base.config = dataclasses.replace(setup.worker.base.config, pause_mode=mode)
    await setup.publish(0)
    group = await setup.start_long(prompt(7), 2)
    await setup.publish(1)
    expected = 0 if mode is PauseMode.wait else 1
    for rollout in await group:
        assert len(rollout.token_ids) == LONG
        assert set(rollout.policy_versions) == {expected}
        assert_sampled_by(setup, prompt(7), rollout)


GREEDY = SamplingConfig(temperature=0, max_tokens=200, stop_at_eos=False)


async def test_responses_that_are_handed_over_go_on_as_if_nothing_had_happened(setup: Setup) -> None:
    """Greedy tokens of a group that was ended on the way, and went on from there, are those of an undisturbed one."""
    undisturbed = await setup.worker.generate_group(prompt(11), 2, GREEDY)
    group = await setup.start_long(prompt(11), 2, GREEDY)
    await setup.worker.hand_over()
    await setup.engine.be_slow(False)
    parts = await group
    assert [part.finish_reason for part in parts] == [ABORTED] * 2
    assert all(0 < len(part.token_ids) == len(part.logprobs) == len(part.policy_versions) < 200 for part in parts)
    setup.worker._is_going = False  # as another worker, which has the same weights, never was
    whole = await setup.worker.generate_group(prompt(11), 2, GREEDY, None, parts)
    for one, other in zip(whole, undisturbed, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, "length")
        assert one.logprobs == pytest.approx(other.logprobs, abs=MAX_LOGPROB_ERROR)
        assert one.policy_versions == other.policy_versions


async def test_a_request_that_the_engine_refuses_is_one_clear_error(setup: Setup):
    await setup.publish(0)
    with pytest.raises(EngineError, match="a request of 2000 prompt"):
        await setup.worker.generate_group(Prompt(0, (5,) * 2000, ""), 2)
    await setup.worker.check()
    assert not setup.engine._stamps, "nothing is left in flight"


async def test_what_an_engine_had_sampled_outlives_it(setup: Setup) -> None:
    """From here on there is no engine."""
    undisturbed = await setup.worker.generate_group(prompt(12), 2, GREEDY)
    group = await setup.start_long(prompt(12), 2, GREEDY)
    for process in setup.engine.process.children:
        process.kill()
    for part, whole in zip(await group, undisturbed, strict=True):
        num_tokens = len(part.token_ids)
        assert (part.finish_reason, part.token_ids) == (ABORTED, whole.token_ids[:num_tokens]) and num_tokens > 0
        assert part.logprobs == pytest.approx(whole.logprobs[:num_tokens], abs=MAX_LOGPROB_ERROR)
        assert part.policy_versions == whole.policy_versions[:num_tokens]
    with pytest.raises(EngineDied, match="SIGKILL"):
        await setup.worker.generate_group(prompt(12), 2, GREEDY)


async def test_a_worker_that_was_stopped_leaves_no_socket_behind(setup: Setup):
    """The last test of this file: the worker is gone after it."""
    assert [path for path in setup.temporary.rglob("*") if path.is_socket()], "vLLM makes them below this folder"
    await setup.worker.stop()
    assert not [path for path in setup.temporary.rglob("*") if path.is_socket()]
