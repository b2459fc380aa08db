"""What responses are worth by several rewards: who is asked what, what is added up, and what is said once.

Pools that answer at once stand in for the processes.
"""

import logging
from pathlib import Path
from typing import Any

import pytest

from slipstream.conf.schema import JudgeConfig, RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards import reward_pool
from slipstream.rollout.rewards.function import Form
from slipstream.rollout.rewards.reward_pool import LATE_S, Answer, RewardPool, reward_environment
from slipstream.rollout.rewards.runner import RewardRunner
from slipstream.rollout.types import Judgement, Prompt, Rollout
from slipstream.rollout.user_processes.outcomes import DIED, RAISED, SCORE, TIMEOUT, Outcome
from slipstream.rollout.user_processes.user_process import Lost

PROMPT = Prompt(7, (1,), "p", {"answer": "a"})


class Pool:
    """Answers from a list; notes what it is asked."""

    def __init__(self, *outcomes: Outcome, is_of_group: bool = False) -> None:
        self.left, self.asked = list(outcomes), []
        self.form = Form(False, is_of_group)

    async def judge(self, prompt: str, responses: Any, fields: Any, messages: Any = None) -> Answer:
        self.asked.append((prompt, list(responses), dict(fields)))
        return Answer([self.left.pop(0) for _ in responses], {})


def runner_of(config: RewardConfig, max_response_tokens: int = 0, **pools: Pool) -> RewardRunner:
    runner = RewardRunner(config, max_response_tokens=max_response_tokens)
    assert runner._pools.keys() == pools.keys()
    runner._pools = pools  # pyright: ignore[reportAttributeAccessIssue]
    runner._forms = {name: pool.form for name, pool in pools.items()}
    return runner


def rollouts(*texts: str) -> list[Rollout]:
    return [Rollout([5] * len(text), [0.0], [0], text, "length" if text == "bb" else "stop") for text in texts]


def score(value: float, answer: str | None = None) -> Outcome:
    return Outcome(SCORE, value, answer=answer)


async def test_each_reward_is_asked_in_its_own_way_and_the_weighted_sum_is_told() -> None:
    config = RewardConfig(
        parts={"one": {"weight": 2.0}, "all": {"weight": -0.5}}, overlong_tokens=2, overlong_penalty=0.5
    )
    one, of_all = Pool(score(1), score(0, "b"), score(3)), Pool(score(4), score(8, "c"), is_of_group=True)
    runner = runner_of(config, 3, one=one, all=of_all)
    judged = await runner.score_group(PROMPT, rollouts("a", "bb"))
    assert one.asked == [
        ("p", ["a"], {"finish_reason": "stop", "answer": "a"}),
        ("p", ["bb"], {"finish_reason": "length", "answer": "a"}),
    ]
    assert of_all.asked == [("p", ["a", "bb"], {"finish_reason": ["stop", "length"], "answer": "a"})]
    assert judged == [
        Judgement(2 - 2, {"one": 1, "all": 4, "overlong_penalty": 0}, None),
        Judgement(0 - 4 - 0.25, {"one": 0, "all": 8, "overlong_penalty": -0.25}, "b"),
    ], "the first answer that a reward tells"
    chosen = await runner.score_group(Prompt(8, (1,), "p", {"answer": "a", "reward": ["one"]}), rollouts("a"))
    assert chosen == [Judgement(6, {"one": 3, "overlong_penalty": 0}, None)]


async def test_a_reward_that_fails_leaves_its_sample_out_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def raised(place: str, report: str) -> Outcome:
        return Outcome(RAISED, report=report, place=place)

    failures = [raised("KeyError a.py:3", "first"), raised("KeyError a.py:3", "second"), raised("KeyError a.py:4", "x")]
    died = Outcome(DIED, report="the reward process ended")
    pool = Pool(*failures, score(1), died, died)
    runner = runner_of(RewardConfig(), exact_match=pool)
    judged = await runner.score_group(PROMPT, rollouts("a", "b", "c", "d"))
    assert [one.reward for one in judged] == [None, None, None, 1.0]
    assert judged[0].parts == {"exact_match": None}
    await runner.score_group(PROMPT, rollouts("a", "b"))
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.splitlines()[-1] for line in told] == ["first", "x", "the reward process ended"]
    assert told[0].startswith("reward exact_match failed (raised) on prompt 7; its sample is left out; ")


async def test_a_lost_question_is_a_failure_of_all_its_responses_and_counts_are_those_that_are_known() -> None:
    pool = RewardPool("reward", RewardConfig(timeout_s=5.0), None)
    with pytest.raises(RewardError, match="the reward runner is closed"):
        await pool.judge("p", ["a"], {})
    asked: list[Any] = []

    class Processes:
        is_closed = False

        async def ask(self, message: Any, read: Any, timeout_s: float, limit: str) -> Any:
            asked.append((message, timeout_s, limit))
            if message[1] == ["lost", "too"]:
                raise Lost(TIMEOUT, "late")
            return read([[["score", 1.0]], {"requests": 2, "unknown": 7}])

    pool._pool = Processes()  # pyright: ignore[reportAttributeAccessIssue]
    lost = await pool.judge("p", ["lost", "too"], {"a": 1})
    assert lost == Answer([Outcome(TIMEOUT, report="late")] * 2, {})
    assert (await pool.judge("p", ["b"], {})).outcomes == [score(1.0)]
    assert asked[0] == (["p", ["lost", "too"], {"a": 1}, None], 5.0, "reward.timeout_s=5 seconds")
    assert pool.counts == {"requests": 2}
    Processes.is_closed = True
    with pytest.raises(RewardError, match="the reward runner is closed"):
        await pool.judge("p", ["a"], {})


@pytest.mark.parametrize(("is_async", "limit_s", "at_once"), [(False, 5.0, 1), (True, 5.0 + LATE_S, 9)])
async def test_what_a_reward_is_decides_how_long_and_how_many_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_async: bool, limit_s: float, at_once: int
) -> None:
    made: list[Any] = []

    class Processes:
        def __init__(self, program: Any, num_processes: int) -> None:
            self.program, self.num_processes, self.at_once = program, num_processes, 0
            made.append(self)

        async def start(self) -> list[Any]:
            return [is_async, True, "a.py"]

        def limit(self, num_questions: int) -> None:
            self.at_once = num_questions

    monkeypatch.setattr(reward_pool, "UserPool", Processes)
    config = RewardConfig(timeout_s=5.0, max_concurrent=9, num_processes=3)
    pool = RewardPool("reward", config, tmp_path / "rewards.log")
    assert await pool.start() == Form(is_async, True, "a.py")
    ((processes, program),) = ((one, one.program) for one in made)
    assert (processes.num_processes, processes.at_once, pool._limit_s) == (3, at_once, limit_s)
    assert (program.option, program.log_path) == ("reward.kind=exact_match", tmp_path / "rewards.log")
    assert program.first_message[1:] == ["reward", str(tmp_path)] and program.silence_s is None
    await RewardPool("reward", config, None, num_processes=1).start()
    assert made[1].num_processes == 1 and made[1].program.first_message[2] is None


def test_a_process_gets_what_programs_need_what_it_is_promised_and_its_judges_key() -> None:
    there = {"HOME": "/h", "SECRET": "s", "MINE": "m", "KEY": "k", "CUDA_VISIBLE_DEVICES": "1", "PATH": "/bin"}
    judge = JudgeConfig(base_url="http://127.0.0.1:1/v1", model="g", api_key_env="KEY")
    given = reward_environment(RewardConfig(kind="judge", judge=judge, env=("MINE",)), there)
    assert given.keys() == {"HOME", "MINE", "KEY", "CUDA_VISIBLE_DEVICES", "PATH", "PYTHONPATH"}
    assert "KEY" not in reward_environment(RewardConfig(env=("MINE",)), there)
    with pytest.raises(RewardError, match=r"^reward\.judge\.api_key_env names KEY, which is not set"):
        reward_environment(RewardConfig(kind="judge", judge=judge), {})
    with pytest.raises(RewardError, match=r"^reward\.parts\.a\.env names MINE, which is not set .*; export it, or"):
        reward_environment(RewardConfig(env=("MINE",)), {}, "reward.parts.a")
