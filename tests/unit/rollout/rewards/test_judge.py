"""The reward `judge`: what it asks, when it asks again, what it counts, and what a bad answer costs."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes import reward_runs
from fakes.judge_server import JudgeServer, judge_server
from fakes.reward_runs import running

from slipstream.conf.schema import JudgeConfig, RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.openai_client import NoAnswer, Rate, retry_after_s
from slipstream.rollout.rewards import judge as judge_module
from slipstream.rollout.rewards.counting import counted
from slipstream.rollout.rewards.judge import Judge, NoVerdict
from slipstream.rollout.rewards.judge_prompt import columns_needed, fill, question_of
from slipstream.rollout.rewards.runner import RewardRunner, check_reward
from slipstream.rollout.types import Prompt

PROMPT = Prompt(0, (1,), "<user>", {"answer": "four"}, [{"role": "user", "content": "2 + 2 = {{answer}}"}])


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("Is {response} right? {{ prompt }} is {{answer}}: <<{{response}}>>")
    return path


@asynccontextmanager
async def judging(
    template: Path, *, log_path: Path | None = None, options: dict[str, Any] | None = None, **judge: Any
) -> AsyncIterator[tuple[JudgeServer, RewardRunner]]:
    async with judge_server() as server:
        section = JudgeConfig(base_url=server.url, model="grader", prompt_file=str(template), **judge)
        config = RewardConfig(kind="judge", judge=section, **(options or {}))
        async with running(config, log_path=log_path) as runner:
            yield server, runner


async def rewards_of(runner: RewardRunner, *texts: str) -> list[float | None]:
    return await reward_runs.rewards_of(runner, PROMPT, *texts)


async def test_a_verdict_becomes_a_share_of_its_range_and_its_tokens_are_counted(template: Path):
    async with judging(template, extra={"reasoning_effort": "low", "max_tokens": None}) as (server, runner):
        assert await rewards_of(runner, "good") == [0.7]
        assert runner.take_counts() == {
            "judge_requests": 1, "judge_prompt_tokens": 100, "judge_completion_tokens": 5,
        }  # fmt: skip
        assert runner.take_counts() == {}
    question = "Is {response} right? 2 + 2 = {{answer}} is four: <<good>>"
    assert server.bodies == [
        {
            "model": "grader",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "reasoning_effort": "low",
        }
    ]
    assert server.keys == {""}


async def test_what_may_pass_is_asked_again_and_counted(template: Path):
    async with judging(template, options={"timeout_s": 60}) as (server, runner):
        texts = ("busy twice", "broken once", "hangs up once", "no usage")
        assert await rewards_of(runner, *texts) == [0.7, 0.7, 0.7, 1.0]
        assert server.asked == {"busy twice": 3, "broken once": 2, "hangs up once": 2, "no usage": 1}
        assert runner.take_counts() == {
            "judge_requests": 8, "judge_retries": 4, "judge_prompt_tokens": 300, "judge_completion_tokens": 15,
        }  # fmt: skip


def test_a_judge_gets_the_words_of_a_chat_without_the_marks_of_the_policys_template():
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    for messages, question in (
        (None, "<user>2 + 2?"),
        ([user], "2 + 2?"),
        ([system, user], "system: Be brief.\n\nuser: 2 + 2?"),
        ([user, call, {"role": "tool", "content": "4"}], 'user: 2 + 2?\n\nassistant: {"id": "a"}\n\ntool: 4'),
    ):
        assert question_of(Prompt(0, (1,), "<user>2 + 2?", {}, messages)) == question


async def test_equal_questions_are_asked_once_and_remembered_by_later_runs(template: Path, tmp_path: Path):
    cache = str(tmp_path / "verdicts.sqlite")
    async with judging(template, cache_path=cache) as (server, runner):
        assert await rewards_of(runner, "slow", "slow", "slow #2") == [0.7] * 3
        assert server.asked == {"slow": 1, "slow #2": 1}
        assert runner.take_counts()["judge_cached"] == 1
        assert await rewards_of(runner, "no number", "no number") == [None, None]
        assert server.asked["no number"] == 2  # what is no verdict is not kept
        url = server.url
    section = JudgeConfig(base_url=url, model="grader", prompt_file=str(template), cache_path=cache)
    async with running(RewardConfig(kind="judge", judge=section)) as later:  # nobody listens there any more
        assert await rewards_of(later, "slow", "slow #2") == [0.7] * 2
        assert later.take_counts() == {"judge_cached": 2}


def test_turns_are_even_and_rest_while_the_judge_asks_for_patience():
    rate = Rate(2.0)
    assert [rate.take_turn(100.0) for _ in range(3)] == [100.0, 102.0, 104.0]
    assert rate.take_turn(110.0) == 110.0  # turns that nobody took are not saved up
    rate.rest_until(200.0)
    assert rate.next_turn(111.0) == 200.0
    assert [rate.take_turn(111.0), rate.take_turn(201.0)] == [200.0, 202.0]
    rate.rest_until(150.0)
    assert rate.next_turn(203.0) == 204.0
    assert [Rate(0.0).take_turn(5.0)] * 2 == [5.0, 5.0]


def a_judge(folder: Path | None = None, num_processes: int = 1, **judge: Any) -> Judge:
    """One in this process; nobody listens where it asks, unless it is told another place."""
    constants = {name: judge.pop(name) for name in ("try_timeout_s", "max_tries") if name in judge}
    kind = type("Asked", (JudgeConfig,), constants)
    section = kind(**{"base_url": "http://127.0.0.1:1/v1", "model": "grader"} | judge)
    config = RewardConfig(kind="judge", judge=section, num_processes=num_processes, timeout_s=60, max_concurrent=1)
    return Judge(config, "reward", folder)


NO_VERDICT = {
    "always broken": "gave no answer in 2 tries; the last one: status 503",
    "forbidden": "the judge refused the request with status 401: b'no such key'",
    "elsewhere": "the judge refused the request with status 302",
    "not JSON": "the judge's answer is no chat completion: b'<html>",
    "not a completion": "the judge's answer is no chat completion",
    "no text": "the judge's answer has no text",
    "no number": "no number in the judge's verdict: 'I cannot say.'",
    "out of range": "11 is not from 0 to 10 in the verdict",
    "endless": "the judge answered more than 1048576 bytes",
    "silent": "gave no answer in 2 tries; the last one: TimeoutError",
    "busy for an hour": "gave no answer in 1 tries; the last one: status 429",
}
"""What the judge does, and what is said of it."""


async def test_no_verdict_says_why_and_asks_again_only_where_that_may_help(template: Path):
    async with judge_server() as server:
        asks = {"base_url": server.url, "prompt_file": str(template), "max_tries": 2}
        patient, hasty = a_judge(**asks), a_judge(**asks, try_timeout_s=0.5)
        for text, told in NO_VERDICT.items():
            judge = hasty if text == "silent" else patient
            with counted() as counts, pytest.raises((NoAnswer, NoVerdict), match=re.escape(told)):
                await judge.judge("p", text, {"answer": "b"})
            assert server.asked[text] == counts["requests"] == (2 if "in 2 tries" in told else 1), text
        with pytest.raises(NoAnswer, match=r"no request may leave before reward\.timeout_s is over"):
            await patient.judge("p", "good", {"answer": "b"})  # it was busy for an hour
        for judge in (patient, hasty):
            await judge._client.close()


def test_a_verdict_is_a_share_of_its_scale_and_both_ends_are_in_it():
    judge = a_judge(scale=(2.0, 6.0))
    assert [judge._read(text) for text in ("2", "3", "6", "5 at first, then 4")] == [0.0, 0.25, 1.0, 0.5]
    for text in ("1.9", "6.1", "-3", ""):
        with pytest.raises(NoVerdict):
            judge._read(text)


def test_processes_of_a_judge_share_its_requests_a_minute():
    for judge, seconds in ((a_judge(), 0.0), (a_judge(requests_per_minute=30, num_processes=3), 6.0)):
        assert [judge._client._rate.take_turn(now) for now in (10.0, 10.0)] == [10.0, 10.0 + seconds]


async def test_only_what_is_asked_of_the_same_judge_in_the_same_way_is_remembered(tmp_path: Path, monkeypatch):
    asked: list[tuple[str, Any]] = []

    def asks(judge: Judge, response: str = "a"):
        async def post(path: str, body: dict[str, Any], deadline: float) -> bytes:
            asked.append((path, body))
            assert deadline == 160.0, "timeout_s after it was asked"
            return b'{"choices": [{"message": {"content": "7"}}], "usage": {"prompt_tokens": -3}}'

        judge._client.post = post  # type: ignore[method-assign]
        return judge.judge("p", response, {"answer": "b"})

    monkeypatch.setattr(judge_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    for number, other in enumerate(
        (
            {},
            {"base_url": "http://127.0.0.1:2/v1"},
            {"model": "other"},
            {"extra": {"temperature": 1}},
            {"extra": {"n": 1}},
        )
    ):
        for _ in range(2):
            assert await asks(a_judge(tmp_path, **other)) == 0.7
        assert len(asked) == number + 1, other
    with counted() as counts:
        assert await asks(a_judge(tmp_path), "b") == await asks(a_judge(), "a") == 0.7
    assert len(asked) == 7 and asked[0][0] == "/chat/completions"
    assert counts == {"prompt_tokens": 0, "completion_tokens": 0}
    assert [body.get("temperature") for _, body in asked] == [0.0] * 3 + [1] + [0.0] * 3
    assert {body["max_tokens"] for _, body in asked} == {512}


async def test_equal_questions_are_asked_one_after_the_other_also_where_none_gets_a_verdict(monkeypatch):
    """The third comes when the first has failed and the second is being asked."""
    judge, most, now = a_judge(), 0, 0

    async def post(path: str, body: dict[str, Any], deadline: float) -> bytes:
        nonlocal most, now
        now += 1
        most = max(most, now)
        for _ in range(9):
            await asyncio.sleep(0)
        now -= 1
        return b'{"choices": [{"message": {"content": "who knows"}}]}'

    monkeypatch.setattr(judge._client, "post", post)
    first, second = (asyncio.create_task(judge.judge("p", "a", {"answer": "b"})) for _ in range(2))
    await asyncio.wait([first])
    third = asyncio.create_task(judge.judge("p", "a", {"answer": "b"}))
    outcomes = await asyncio.gather(first, second, third, return_exceptions=True)
    assert [type(one) for one in outcomes] == [NoVerdict] * 3 and most == 1
    assert not judge._asking, "nothing is kept of what nobody asks any more"


async def test_the_key_is_sent_and_written_nowhere(template: Path, tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("MY_JUDGE_KEY", "sesame")
    log = tmp_path / "run" / "rewards.log"
    log.parent.mkdir()
    async with judging(template, api_key_env="MY_JUDGE_KEY", log_path=log) as (server, runner):
        assert await rewards_of(runner, "good", "forbidden", "no number") == [0.7, None, None]
        assert server.keys == {"Bearer sesame"}
    assert "reward judge failed (raised) on prompt 0" in caplog.text and "no such key" in caplog.text
    assert "sesame" not in caplog.text
    for file in log.parent.iterdir():
        assert b"sesame" not in file.read_bytes()


def test_what_fills_a_place_is_not_read_again():
    filled = fill("{{prompt}}|{{response}}|{{note}}", "{{note}}", "{{prompt}}", {"note": 3, "response": "a column"})
    assert filled == "{{note}}|{{prompt}}|3"


def test_columns_of_a_prompt_file_are_needed(template: Path):
    config = RewardConfig(
        kind="judge", judge=JudgeConfig(base_url="http://localhost/v1", model="m", prompt_file=str(template))
    )
    assert columns_needed(config, "reward") == [("judge.prompt_file", "answer")]


def test_retry_after_has_seconds_or_a_date():
    past = "Tue, 1 Jan 2019 00:00:00 GMT"
    for value, seconds in {"3": 3.0, "0": 0.0, "1.5": 1.5, "-3": 0.0, "soon": 0.0, "": 0.0, past: 0.0}.items():
        assert retry_after_s(httpx.Headers({"retry-after": value})) == seconds, value
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    assert 3500 < retry_after_s(httpx.Headers({"retry-after": later})) <= 3600
    by_a_clock_of_its_own = {"date": "Wed, 01 Jan 2070 00:00:00 GMT", "retry-after": "Wed, 01 Jan 2070 00:00:20 GMT"}
    assert retry_after_s(httpx.Headers(by_a_clock_of_its_own)) == 20
    assert retry_after_s(httpx.Headers()) == 0.0


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"api_key_env": "NO_SUCH_KEY"}, r"reward\.judge\.api_key_env names NO_SUCH_KEY, which is not set"),
        ({"prompt_file": "nowhere.txt"}, r"reward\.judge\.prompt_file=nowhere\.txt cannot be read: .*No such file"),
        ({"prompt_file": "TMP/empty.txt"}, r"has no place for the response; write \{\{response\}\} where it goes"),
        ({"prompt_file": "TMP/bytes.txt"}, r"cannot be read: 'utf-8' codec"),
        ({"cache_path": "TMP/empty.txt/x"}, r"reward\.judge\.cache_path=.* cannot be used: unable to open"),
        ({"cache_path": "TMP/text.txt"}, r"reward\.judge\.cache_path=.* cannot be used: file is not a database"),
    ],
)
def test_a_judge_that_cannot_be_set_up_is_refused_before_the_run(tmp_path: Path, judge: dict[str, str], message: str):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xff")
    (tmp_path / "text.txt").write_text("a text of some length that is no database" * 100)
    options = {name: value.replace("TMP", str(tmp_path)) for name, value in judge.items()}
    section = JudgeConfig(base_url="http://localhost/v1", model="m", **options)
    with pytest.raises(RewardError, match=message):
        check_reward(RewardConfig(kind="judge", judge=section))
