"""Rewards in processes of their own: whatever a user's function does costs one sample; who judges at the same time."""

import asyncio
import hashlib
import logging
from pathlib import Path

import pytest
from fakes.reward_runs import rewards_of, rollouts, running

from slipstream.conf.schema import RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards.function import load_reward
from slipstream.rollout.rewards.runner import check_reward
from slipstream.rollout.types import Prompt

REWARDS = """
import asyncio, os, sys, time

def behave(prompt, response, fields):
    if response == "raise":
        raise KeyError("no such thing")
    if response.startswith("cannot parse"):
        raise ValueError(response + "\\nin " + prompt)
    if response == "hang":
        time.sleep(600)
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit(4)
    if response == "close":
        os.closerange(3, 4096)
        time.sleep(60)
    if response == "print":
        print("x" * (1 << 22))
        print("y" * (1 << 22), file=sys.stderr)
    return {"string": "1.0", "nan": float("nan")}.get(response, 0.5)

def with_answers(prompt, responses, fields):
    assert fields["finish_reason"] == ["stop"] * len(responses)
    return [(1, "\u6f22" * 300) for _ in responses]

class Barrier:
    waiting = most = 0
    opened = asyncio.Event()

async def crowd(prompt, response, fields):
    "How many are judged at the same time: three at least, and more may come meanwhile."
    if response == "raise":
        raise KeyError
    Barrier.waiting += 1
    Barrier.most = max(Barrier.most, Barrier.waiting)
    if Barrier.waiting == 3:
        Barrier.opened.set()
    await Barrier.opened.wait()
    await asyncio.sleep(0.05)
    Barrier.waiting -= 1
    return Barrier.most

async def block(prompt, response, fields):
    if response == "late":
        time.sleep(7)
        await asyncio.Event().wait()
    return 1.0

def meet(prompt, response, fields):
    "Answers when another process is in here as well."
    folder = os.path.dirname(__file__)
    open(os.path.join(folder, f"here-{os.getpid()}"), "w").close()
    while len([name for name in os.listdir(folder) if name.startswith("here-")]) < 2:
        time.sleep(0.01)
    return len(response)
"""
PROMPT = Prompt(0, (1,), "p", {"answer": "a"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "user_rewards.py").write_text(REWARDS)
    return tmp_path / "user_rewards.py"


@pytest.mark.parametrize(("response", "expected"), [("a", 1.0), (" a\n", 1.0), ("A", 0.0), ("ab", 0.0), ("", 0.0)])
def test_exact_match_ignores_outer_white_space_and_keeps_case(response, expected):
    assert load_reward(RewardConfig()).function("p", response, {"answer": " a"}) == (expected, response.strip())


def test_exact_match_compares_numbers_as_text_and_accents_however_they_are_written():
    exact = load_reward(RewardConfig()).function
    assert exact("p", "42", {"answer": 42}) == exact("p", "42", {"answer": 42.0}) == (1.0, "42")
    assert exact("p", "0.5", {"answer": 0.5}) == (1.0, "0.5")
    assert exact("p", "e\u0301", {"answer": "\u00e9"}) == exact("p", "\u00e9", {"answer": "e\u0301"}) == (1.0, "\u00e9")


async def test_the_reward_none_asks_for_no_column_and_is_0_for_every_response():
    config = RewardConfig(kind="none")
    assert config.by_name["none"].columns == ()
    async with running(config) as runner:
        assert await rewards_of(runner, Prompt(0, (1,), "p"), "a", "") == [0.0, 0.0]


async def test_each_failure_costs_one_sample_and_is_counted(file, caplog, tmp_path):
    log = tmp_path / "rewards.log"
    async with running(RewardConfig(kind=f"{file}:behave", timeout_s=5.0), log_path=log) as runner:
        texts = ["ok", "raise", "hang", "exit", "sys.exit", "string", "nan", "print", "raise", "ok"]
        with caplog.at_level(logging.WARNING, "slipstream.rollout.rewards.runner"):
            caplog.clear()
            rewards = await rewards_of(runner, PROMPT, *texts)
        assert rewards == [0.5, None, None, None, None, None, None, 0.5, None, 0.5]
        told = [one.message.partition("(")[2].partition(")")[0] for one in caplog.records]
        # KeyError (twice raised, once told) and SystemExit; a string and a number that is none
        assert told == ["raised", "timeout", "died", "raised", "not_a_number", "not_a_number"]
        assert any("exit status 3" in record.message for record in caplog.records)
        caplog.clear()
        assert await rewards_of(runner, PROMPT, "ok", "cannot parse 1", "cannot parse 2") == [0.5, None, None]
        said = ["ValueError" in one.message for one in caplog.records]
        assert said == [True], "whatever it quotes, it is of one kind"
        # a place is held for seconds at most
        assert await rewards_of(runner, PROMPT, "close", "ok") == [None, 0.5]
        assert "close no descriptor that you did not open" in caplog.text
    assert log.stat().st_size > 1 << 22, "what rewards print"


async def test_answers_of_a_large_group_have_room(file: Path):
    """Each is cut to 200 characters of three bytes."""
    async with running(RewardConfig(kind=f"{file}:with_answers")) as runner:
        assert await rewards_of(runner, PROMPT, *["a"] * 1024) == [1.0] * 1024


async def test_a_coroutine_that_blocks_the_others_costs_itself_alone(file: Path):
    config = RewardConfig(kind=f"{file}:block", max_concurrent=2, num_processes=1, timeout_s=1.0)
    async with running(config) as runner:
        assert await rewards_of(runner, PROMPT, "late", "b") == [None, 1.0]


async def test_max_concurrent_bounds_the_coroutines_of_one_process_and_one_that_raises_costs_itself(file: Path):
    async with running(RewardConfig(kind=f"{file}:crowd", max_concurrent=3, timeout_s=60)) as runner:
        raised, *judged = await rewards_of(runner, PROMPT, "raise", *"abcdefghij")
        assert raised is None and max(reward or 0.0 for reward in judged) == 3


async def test_processes_judge_at_the_same_time_and_keep_the_order(file: Path):
    async with running(RewardConfig(kind=f"{file}:meet", num_processes=2, timeout_s=60)) as runner:
        assert await rewards_of(runner, PROMPT, "a", "bb", "", "ccc") == [1.0, 2.0, 0.0, 3.0]


async def test_a_waiter_that_is_cancelled_does_not_free_the_place_of_its_sample(file: Path):
    async with running(RewardConfig(kind=f"{file}:behave")) as runner:
        call = asyncio.create_task(runner.score_group(PROMPT, rollouts(*["a"] * 20)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await rewards_of(runner, PROMPT, "bb", "raise") == [0.5, None]


@pytest.mark.parametrize("answer", [None, True, [1], {"a": 1}, float("nan")])
@pytest.mark.parametrize("kind", ["exact_match", "regex"])
def test_the_text_of_what_is_no_answer_is_not_compared_with(kind, answer):
    """As an agent's row may have it: no response is right, or wrong."""
    reward = load_reward(RewardConfig(kind=kind, pattern="(.*)")).function
    with pytest.raises(ValueError, match="an answer must be text or a number"):
        reward("p", str(answer), {"answer": answer})


def test_a_reward_that_cannot_run_is_refused_before_the_run(tmp_path):
    (tmp_path / "of_a_package.py").write_text("from .others import f\n")
    told = r"^reward\.kind=.*relative import.*; name its package: reward\.kind=\S+\.of_a_package:f, in /"
    with pytest.raises(RewardError, match=told):
        check_reward(RewardConfig(kind=f"{tmp_path}/of_a_package.py:f"))


ASK_MESSAGES = """
def first(messages, response, fields):
    return 0.0 if messages is None else float(messages[-1]["content"])

async def also(prompt, responses, fields, messages):
    return [0.5 if messages is None else float(prompt == "<user>7" and messages[0]["role"] == "user")] * len(responses)
"""


async def test_a_function_that_asks_for_messages_is_given_those_of_the_chat(tmp_path):
    (tmp_path / "own.py").write_text(ASK_MESSAGES)
    parts = {name: {"kind": f"{tmp_path / 'own.py'}:{name}"} for name in ("first", "also")}
    chat = Prompt(0, (1,), "<user>7", {}, [{"role": "user", "content": "7"}])
    async with running(RewardConfig(parts=parts)) as runner:
        assert await rewards_of(runner, chat, "a", "b") == [8.0, 8.0]
        assert await rewards_of(runner, Prompt(0, (1,), "text", {}), "a") == [0.5]


IN_A_FILE = """
import neighbour

def score(prompt, response, fields):
    return neighbour.WORTH
"""


async def test_a_reward_in_a_file_works_from_any_folder_and_its_source_is_kept(tmp_path, monkeypatch, caplog):
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "json.py").write_text(IN_A_FILE)  # the name of an installed module, which stays what it is
    (folder / "neighbour.py").write_text("WORTH = 0.25\n")
    digest = hashlib.sha256(IN_A_FILE.encode()).hexdigest()
    for start, path in ((elsewhere, folder / "json.py"), (folder, Path("json.py")), (tmp_path, Path("mine/json.py"))):
        monkeypatch.chdir(start)
        caplog.set_level(logging.INFO, "slipstream.conf.functions")
        parts = {"own": {"kind": f"{path}:score"}, "right": {"weight": 0.0}}
        async with running(RewardConfig(parts=parts), log_path=tmp_path / "rewards.log") as runner:
            assert await rewards_of(runner, PROMPT, "a") == [0.25]
        kept = {one.name: one.read_text() for one in tmp_path.glob("reward_source*")}
        assert kept == {"reward_source_own.py": IN_A_FILE}
        assert f"{folder / 'json.py'}, sha256 {digest}" in caplog.text
