"""Several rewards, rewards of a group, coroutines, processes in parallel: who judges what, what a failure costs."""

import asyncio
import logging
import os
from pathlib import Path

import pytest
from fakes.reward_runs import rewards_of, rollouts, running

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_resolved_yaml, load_run_config, resolved_yaml
from slipstream.conf.schema import RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards.runner import check_reward
from slipstream.rollout.types import Judgement, Prompt

REWARDS = '''
import asyncio, os, time

def length(prompt, response, fields):
    if response == "raise":
        raise ValueError("too short")
    return len(response)

def rank(prompt, responses, fields):
    """The shortest gets 1, the others what remains of it."""
    if "raise" in responses:
        raise ValueError("one of them")
    assert fields["finish_reason"] == ["stop"] * len(responses)
    return [min(map(len, responses)) / len(response) for response in responses]

def with_answers(prompt, responses, fields):
    return [(1, "\u6f22" * 300) for _ in responses]

class Barrier:
    waiting = most = 0
    opened = asyncio.Event()

async def all_four(prompt, response, fields):
    """Answers when four samples are being judged at the same time."""
    Barrier.waiting += 1
    if Barrier.waiting == 4:
        Barrier.opened.set()
    await Barrier.opened.wait()
    return 1.0

async def crowd(prompt, response, fields):
    """How many are judged at the same time: three at least, and more may come meanwhile."""
    Barrier.waiting += 1
    Barrier.most = max(Barrier.most, Barrier.waiting)
    if Barrier.waiting == 3:
        Barrier.opened.set()
    await Barrier.opened.wait()
    await asyncio.sleep(0.05)
    Barrier.waiting -= 1
    return Barrier.most

async def behave(prompt, response, fields):
    if response == "hang":
        await asyncio.sleep(600)
    if response == "block":
        time.sleep(600)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "exit":
        os._exit(3)
    return os.getpid() if response == "pid" else 0.5

def meet(prompt, response, fields):
    """Answers when another process is in here as well."""
    folder = os.path.dirname(__file__)
    open(os.path.join(folder, f"here-{os.getpid()}"), "w").close()
    while len([name for name in os.listdir(folder) if name.startswith("here-")]) < 2:
        time.sleep(0.01)
    return 1.0
'''
PROMPT = Prompt(0, (1,), "p", {"answer": "aaa"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "several.py"
    path.write_text(REWARDS)
    return path


async def test_the_weighted_sum_is_what_trains_and_each_part_is_kept(file: Path, caplog: pytest.LogCaptureFixture):
    parts = {"right": {}, "brevity": {"kind": f"{file}:length", "weight": -0.25}}
    with caplog.at_level(logging.WARNING, "slipstream.rollout.rewards.runner"):
        async with running(RewardConfig(parts=parts)) as runner:
            judged = await runner.score_group(PROMPT, rollouts("aaa", "b", "raise"))
    assert judged == [
        Judgement(1.0 - 0.25 * 3, {"right": 1.0, "brevity": 3.0}, "aaa"),
        Judgement(-0.25, {"right": 0.0, "brevity": 1.0}, "b"),
        Judgement(None, {"right": 0.0, "brevity": None}, "raise"),
    ]
    assert "reward brevity failed (raised) on prompt 0" in caplog.text


async def test_a_single_reward_is_named_after_its_function(file: Path):
    async with running(RewardConfig(kind=f"{file}:length", weight=2.0)) as runner:
        assert await runner.score_group(PROMPT, rollouts("bb")) == [Judgement(4.0, {"length": 2.0})]


async def test_a_reward_of_a_group_that_fails_costs_the_group(file: Path, caplog: pytest.LogCaptureFixture):
    async with running(RewardConfig(kind=f"{file}:rank")) as runner:
        assert await rewards_of(runner, PROMPT, "raise", "a") == [None, None]
        assert "ValueError: one of them" in caplog.text
        assert await rewards_of(runner, PROMPT, "aaaa", "aa", "a") == [0.25, 0.5, 1.0]


async def test_answers_of_a_large_group_have_room(file: Path):
    """Each is cut to 200 characters of three bytes."""
    async with running(RewardConfig(kind=f"{file}:with_answers")) as runner:
        assert await rewards_of(runner, PROMPT, *["a"] * 1024) == [1.0] * 1024


async def test_coroutines_of_one_process_judge_at_the_same_time(file: Path):
    async with running(RewardConfig(kind=f"{file}:all_four", timeout_s=60)) as runner:
        assert await rewards_of(runner, PROMPT, *"abcd") == [1.0] * 4


async def test_max_concurrent_bounds_the_samples_of_one_process(file: Path):
    async with running(RewardConfig(kind=f"{file}:crowd", max_concurrent=3, timeout_s=60)) as runner:
        assert max(reward or 0.0 for reward in await rewards_of(runner, PROMPT, *"abcdefghij")) == 3


async def test_a_coroutine_that_hangs_or_raises_costs_one_sample_and_its_process_goes_on(file: Path):
    async with running(RewardConfig(kind=f"{file}:behave", timeout_s=5)) as runner:
        first, hung, raised, fine, last = await rewards_of(runner, PROMPT, "pid", "hang", "raise", "ok", "pid")
        assert (hung, raised, fine) == (None, None, 0.5)
        assert first == last == (await rewards_of(runner, PROMPT, "pid"))[0]


@pytest.mark.parametrize("how", ["block", "exit"])
async def test_a_coroutine_that_takes_its_process_costs_what_was_in_it(file: Path, how: str):
    async with running(RewardConfig(kind=f"{file}:behave", timeout_s=5)) as runner:
        assert await rewards_of(runner, PROMPT, "hang", how) == [None, None]
        assert await rewards_of(runner, PROMPT, "ok", "ok") == [0.5, 0.5]


async def test_processes_judge_at_the_same_time(file: Path):
    async with running(RewardConfig(kind=f"{file}:meet", num_processes=2, timeout_s=60)) as runner:
        assert await rewards_of(runner, PROMPT, "a", "b") == [1.0, 1.0]


async def test_a_waiter_that_is_cancelled_does_not_free_the_place_of_its_sample(file: Path):
    async with running(RewardConfig(kind=f"{file}:length")) as runner:
        call = asyncio.create_task(runner.score_group(PROMPT, rollouts(*["a"] * 20)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await rewards_of(runner, PROMPT, "bb", "ccc") == [2.0, 3.0]


async def test_sources_of_several_rewards_are_kept_apart(file: Path, tmp_path: Path):
    parts = {"brevity": {"kind": f"{file}:length"}, "ordered": {"kind": f"{file}:rank"}, "right": {}}
    async with running(RewardConfig(parts=parts), log_path=tmp_path / "run.log"):
        pass
    kept = sorted(name for name in os.listdir(tmp_path) if name.startswith("reward_source"))
    assert kept == ["reward_source_brevity.py", "reward_source_ordered.py"]


def test_a_part_that_cannot_run_is_refused_by_its_name(tmp_path: Path):
    parts = {"right": {}, "brevity": {"kind": f"{tmp_path}/no.py:length"}}
    with pytest.raises(RewardError, match=r"reward\.parts\.brevity\.kind=.*: there is no file"):
        check_reward(RewardConfig(parts=parts))


PARTS = ["experiment=quickstart", "reward.parts.right.kind=regex"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.parts.b.knd=regex"], r"unknown option reward\.parts\.b\.knd\. Did you mean kind\?"),
        (["reward.parts.b=3"], r"reward\.parts\.b must be a mapping of options, got 3"),
        (["reward.parts.b.weight=much"], r"reward\.parts\.b\.weight must be a number, got 'much'"),
        (["reward.parts.b.weight=.inf"], r"reward\.parts\.b\.weight must be a number"),
        (["reward.parts.b.weight=nan"], r"reward\.parts\.b\.weight must be finite, got nan"),
        (["reward.parts.b.kind=rgex"], r"reward\.parts\.b\.kind must be exact_match, .*, got 'rgex'"),
        (["reward.parts.b.env=KEY"], r"reward\.parts\.b\.env must be a list of texts, got 'KEY'"),
        (["reward.parts.b.timeout_s=0"], r"reward\.parts\.b\.timeout_s must be > 0, got 0"),
        (["reward.parts.mean-1.kind=regex"], r"a reward's name must be a word of .*, got 'mean-1'"),
        (["reward.pattern=x"], r"reward\.pattern has no effect with reward\.parts, each of which has its own"),
    ],
)
def test_a_wrong_option_of_a_part_has_one_message(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_run_config([*PARTS, *words])


def test_parts_survive_the_file_that_a_run_keeps():
    config = load_run_config([*PARTS, "reward.parts.b.kind=mine.py:b", "reward.parts.b.env=[KEY]"])
    assert load_resolved_yaml(resolved_yaml(config)) == config
    assert config.reward.names == ("right", "b")
    assert config.reward.by_name["b"].env == ("KEY",)
