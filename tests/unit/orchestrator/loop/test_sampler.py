"""Locks: how many groups are in flight, what an evaluation samples with, and that pointless sampling ends."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import on_jumping_clock
from fakes.loop import FakePrompts, Loop, make_config
from fakes.workers import FakeWorker

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import EvalSampling, EvalSamplingConfig, SamplingConfig
from slipstream.fleet.errors import WaitTimeout
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.loop.controller import Controller
from slipstream.orchestrator.loop.sampler import Sampler
from slipstream.rollout.agents.episode_runner import FinishedEpisode
from slipstream.rollout.errors import DataError
from slipstream.rollout.types import Judgement, Prompt, Rollout


class Noting(FakeWorker):
    """Notes how many groups it samples at once, and with what."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(worker.world, worker.index)
        self.num_now = self.num_most = 0
        self.asked: dict[bool, list[tuple[int, SamplingConfig | None]]] = {True: [], False: []}
        """Prompt and options of every group, by whether the prompt is held out; None: as rollout.sampling."""

    async def generate_group(
        self,
        prompt: Prompt,
        n: int,
        sampling: SamplingConfig | None = None,
        version: int | None = None,
        so_far: object = (),
    ) -> list[Rollout]:
        self.asked[prompt.prompt_id >= 1000].append((prompt.prompt_id, sampling))
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            return await super().generate_group(prompt, n, sampling)
        finally:
            self.num_now -= 1


@pytest.mark.parametrize("num_places", [1, 3])
async def test_training_and_evaluation_share_the_places(tmp_path: Path, num_places: int) -> None:
    run, rollout = {"eval_every_steps": 1}, {"max_concurrent_groups": num_places}
    config = make_config(num_steps=6, staleness=2, groups_per_step=8, run=run, rollout=rollout)
    loop = Loop(tmp_path, config, num_workers=1)
    loop.workers[0] = worker = Noting(loop.workers[0])
    await loop.run()
    assert worker.num_most == num_places


async def what_is_asked(
    folder: Path, training: SamplingConfig | None = None, drops_flat: bool = False, **evaluation: Any
) -> dict[bool, list[tuple[int, SamplingConfig | None]]]:
    """Prompt and options of every group of a run of a few steps, training and held out."""
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    rollout = {"sampling": training or SamplingConfig(), "eval": EvalSamplingConfig(**evaluation)}
    config = make_config(drop_zero_variance_groups=drops_flat, rollout=rollout, run={"eval_every_steps": 1})
    loop = Loop(folder, config, num_workers=1)
    loop.rewards.is_flat = lambda prompt: drops_flat and prompt.prompt_id % 2 == 0
    loop.workers[0] = worker = Noting(loop.workers[0])
    await loop.run()
    return worker.asked


@pytest.mark.parametrize("temperature", [None, 0.0, 0.6])
async def test_evaluations_have_options_of_their_own(tmp_path: Path, temperature: float | None) -> None:
    training = SamplingConfig(temperature=0.9, max_tokens=256, stop=("x",))
    asked = await what_is_asked(tmp_path, training, temperature=temperature, top_k=7, top_p=0.25)
    drawing = EvalSamplingConfig(temperature=temperature, top_k=7, top_p=0.25)
    expected = EvalSampling(
        temperature=0.9 if temperature is None else temperature, max_tokens=256, stop=("x",), drawing=drawing
    )
    assert {sampling for _, sampling in asked[True]} == {expected}
    assert {sampling for _, sampling in asked[False]} == {None}


async def test_every_group_has_a_seed_of_its_own_and_a_run_can_be_repeated(tmp_path: Path) -> None:
    """Also a group that is sampled in place of one whose rewards were equal."""
    runs = [
        await what_is_asked(tmp_path / str(number), SamplingConfig(seed=seed), drops_flat=True)
        for number, seed in enumerate((5, 5, 6))
    ]
    seeds = [[sampling.seed for _, sampling in run[False]] for run in runs]
    assert None not in seeds[0] and len(set(seeds[0])) == len(seeds[0])
    assert sorted(seeds[0]) == sorted(seeds[1])
    assert not set(seeds[0]) & set(seeds[2])


async def test_a_held_out_prompt_has_the_same_seed_in_every_evaluation(tmp_path: Path) -> None:
    asked = await what_is_asked(tmp_path, seed=3)
    seeds = {(prompt, sampling.seed) for prompt, sampling in asked[True]}
    assert len(asked[True]) > len(seeds) == len({seed for _, seed in seeds}) == len({prompt for prompt, _ in seeds}) > 1
    assert {sampling for _, sampling in asked[False]} == {None}


async def test_every_judged_group_is_told_to_the_order_of_prompts_whatever_lengths_took_from_it(tmp_path: Path) -> None:
    """In one place, and more of equal rewards in all than may come in a row. All right, or all wrong: responses of
    other lengths have other rewards, and say as little."""
    rollout = {"max_concurrent_groups": 1}
    loop = Loop(tmp_path, make_config(num_steps=12, drop_zero_variance_groups=True, rollout=rollout))
    loop.rewards.is_flat = lambda prompt: prompt.prompt_id % 2 == 0
    judge = loop.rewards.score_group

    async def judge_lengths(prompt: Prompt, rollouts: list[Rollout]) -> list[Judgement]:
        lost = [-0.1 * number for number, _ in enumerate(rollouts, start=1)]
        judged = zip(await judge(prompt, rollouts), lost, strict=True)
        return [Judgement((one.reward or 0.0) + taken, {"length_penalty": taken}) for one, taken in judged]

    loop.rewards.score_group = judge_lengths  # type: ignore[method-assign]
    async with asyncio.timeout(60):  # it waits for ever where a place is lost
        await loop.run()
    observed = dict(loop.prompts.observed)
    assert len(observed) == len(loop.prompts.observed) and sum(one % 2 == 0 for one in observed) > 30
    assert max(observed) < 1000, "held-out prompts are not"
    assert {reward for rewards in observed.values() for reward in rewards} == {0.0, 1.0}
    assert all((len(set(rewards)) == 1) == (prompt_id % 2 == 0) for prompt_id, rewards in observed.items())
    assert sum(row["rollout/groups_uninformative"] for row in loop.rows[1:]) >= 4
    assert any(0.0 < row["reward/mean"] < 1.0 for row in loop.rows[1:]), "what trains has them"


async def test_the_runs_reward_judges_episodes_whose_agent_returned_none_and_did_not_fail() -> None:
    """In the order of the episodes; a reward of 0 is one."""
    texts = ["own", "right", "raised", "wrong"]
    rollouts = [Rollout([5], [-0.5], [0], text, "stop", failure="raised" * (text == "raised")) for text in texts]
    episodes = [FinishedEpisode(one, 0.0 if one.text == "own" else None) for one in rollouts]

    async def run_group(*_: Any) -> list[FinishedEpisode]:
        return episodes

    async def score_group(_: Prompt, judged: list[Rollout]) -> list[Judgement]:
        values = [float(["wrong", "right", "own", "raised"].index(one.text)) for one in judged]
        return [Judgement(value, {"style": value / 2}, one.text) for value, one in zip(values, judged, strict=True)]

    services: Any = SimpleNamespace(
        episodes=SimpleNamespace(run_group=run_group), rewards=SimpleNamespace(score_group=score_group), teacher=None,
        activities=SimpleNamespace(note=lambda *_: None), eval_sets={"held": [Prompt(1000, (1,), "a")]},
    )  # fmt: skip
    config = make_config(run={"eval_beside": True}, eval_path="held_out.jsonl")
    sampler = Sampler(config, services, SimpleNamespace())  # type: ignore[arg-type]
    sampler._places = None  # type: ignore[assignment] - those of training, which an evaluation beside it leaves alone
    (group,) = (await sampler.evaluate())["held"]
    assert group.rewards == [0.0, 1.0, None, 0.0]
    assert [parts.get("style") for parts in group.parts] == [None, 0.5, None, 0.0]
    assert group.answers == [None, "right", None, "wrong"]


async def test_prompts_that_tell_nothing_end_the_run_with_its_state_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9, drop_zero_variance_groups=True))
    loop.rewards.is_flat = lambda prompt: loop.world.version >= 2
    with pytest.raises(TrainingStopped, match=r"30 groups in a row had equal rewards \(1 in the last one\)"):
        await loop.run()
    assert loop.saved.step == 2


async def test_a_row_that_cannot_be_a_prompt_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    """As with data.stream, where a row is read when it is needed."""

    class Streamed(FakePrompts):
        def __next__(self) -> Prompt:
            if self.cursor == 8:
                raise DataError("train.jsonl:9: the prompt is empty")
            return super().__next__()

    loop = Loop(tmp_path, make_config(num_steps=9))
    loop.prompts = Streamed()
    with pytest.raises(DataError, match=r"train\.jsonl:9: the prompt is empty"):
        await loop.run()
    assert loop.saved.step >= 1 and loop.saved.prompts == {"cursor": 8}


NO_BUFFER: Any = SimpleNamespace()


def slow_services(group_s: float) -> Any:
    """Each of three held-out groups takes so long."""

    async def generate_group(_: Prompt, n: int, *__: object) -> list[Rollout]:
        await asyncio.sleep(group_s)
        return [Rollout([5], [-0.5], [0], "right", "stop")] * n

    async def score_group(_: Prompt, judged: list[Rollout]) -> list[Judgement]:
        return [Judgement(1.0)] * len(judged)

    return SimpleNamespace(
        episodes=None, router=SimpleNamespace(generate_group=generate_group), teacher=None,
        rewards=SimpleNamespace(score_group=score_group), activities=SimpleNamespace(note=lambda *_: None),
        eval_sets={"held": [Prompt(1000 + number, (1,), "a") for number in range(3)]},
    )  # fmt: skip


@on_jumping_clock
async def test_an_evaluation_is_waited_for_while_its_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each in less than a group may take, and all of them in more."""
    monkeypatch.setattr(Sampler, "patience_s", 60.0)
    config = make_config(rollout={"max_concurrent_groups": 1}, run={"eval_samples_per_prompt": 3})
    sampler = Sampler(config, slow_services(50.0), NO_BUFFER)
    assert [group.rewards for group in (await sampler.evaluate())["held"]] == [[1.0] * 3] * 3
    sampler = Sampler(config, slow_services(70.0), NO_BUFFER)
    with pytest.raises(WaitTimeout, match="gave up after 60 s of waiting for the evaluation of 3 prompts"):
        await sampler.evaluate()


@on_jumping_clock
@pytest.mark.parametrize("is_beside", [True, False])
async def test_an_evaluation_beside_training_has_fewer_places_of_its_own(is_beside: bool) -> None:
    config = make_config(run={"eval_beside": is_beside}, eval_path="held_out.jsonl")
    services, num_now, most = slow_services(1.0), 0, 0
    generate_group = services.router.generate_group

    async def counted(*given: Any) -> list[Rollout]:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        found = await generate_group(*given)
        num_now -= 1
        return found

    services.router.generate_group = counted
    services.eval_sets = {"": [Prompt(1000 + number, (1,), "a") for number in range(80)]}
    await Sampler(config, services, NO_BUFFER).evaluate()
    assert most == (3 if is_beside else 64) == config.num_evaluated_groups


@on_jumping_clock
async def test_a_batch_is_waited_for_while_groups_end_and_its_error_says_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sampler, "patience_s", 60.0)
    roster = SimpleNamespace(num_serving=2)
    services = slow_services(0.0)
    services.supervisor = SimpleNamespace(roster=roster)
    controller = object.__new__(Controller)
    controller._config, controller.services, controller.policy_version = make_config(), services, 0
    controller.sampler = Sampler(make_config(), services, NO_BUFFER)
    controller.sampler.num_uninformative, controller._reported = 7, Counter({"rollout/groups_uninformative": 3})

    async def take_batch(_: int) -> str:
        for _ in range(3):
            await asyncio.sleep(50.0)
            controller.sampler.num_generated += 1
        if is_lost:
            await asyncio.sleep(70.0)
        return "a batch"

    buffer: Any = SimpleNamespace(take_batch=take_batch, num_ready=1)
    controller.buffer, is_lost = buffer, False
    assert await controller._next_batch() == "a batch"
    is_lost = True
    said = "a batch: 1 of 3 groups are in, 2 replicas in service, 4 groups had equal rewards and were replaced"
    with pytest.raises(WaitTimeout, match=f"waiting for {said}"):
        await controller._next_batch()


@pytest.mark.parametrize(
    ("words", "has_teacher", "patience_s"),
    [
        ([], False, 3 * 10 + 24 * 7 + 60),
        (["rollout.num_workers=4"], False, 5 * 10 + 24 * 7 + 60),
        (["rollout.max_restarts=2"], False, 3 * 10 + 24 * 7 + 60 + 500),
        (["algorithm.group_size=5"], True, 3 * 10 + 5 * (7 + 120) + 60),
        (["rollout.agent=a.py:f", "rollout.episodes.timeout_s=40"], False, 40 + 24 * 7 + 60),
        (["rollout.agent=a.py:f", "rollout.episodes.timeout_s=20"], False, 30 + 24 * 7 + 60),
    ],
)
def test_patience_is_for_a_failure_of_each_worker_a_judgement_of_each_response_and_a_start(
    words: list[str], has_teacher: bool, patience_s: float
) -> None:
    timeouts = ("rollout.request_timeout_s=10", "reward.timeout_s=7", "cluster.start_timeout_s=500")
    config = load_run_config(["experiment=quickstart", "rollout.max_restarts=0", *timeouts, *words])
    assert config.algorithm.teacher.timeout_s == 120
    sampler = object.__new__(Sampler)
    sampler._config, sampler._services = config, SimpleNamespace(teacher="one" if has_teacher else None)  # type: ignore[assignment]
    assert sampler.patience_s == patience_s
