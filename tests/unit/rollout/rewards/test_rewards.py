"""Rewards: whatever a user's function does costs one sample; one that cannot run is refused before a run starts."""

import hashlib
import logging
import os
import signal
import textwrap
import time
from pathlib import Path

import pytest
from fakes.reward_runs import rewards_of, running

from slipstream.conf.schema import RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards.function import load_reward
from slipstream.rollout.rewards.runner import check_reward
from slipstream.rollout.types import Prompt

REWARDS = """
    import os, sys, time

    def length(prompt, response, fields):
        return len(response)

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
        if response == "pid":
            return os.getpid()
        if response == "string":
            return "1.0"
        if response == "nan":
            return float("nan")
        if response == "print":
            print("x" * (1 << 22))
            print("y" * (1 << 22), file=sys.stderr)
        return 0.5

    not_callable = 3
"""


@pytest.fixture
def rewards_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module on the path of reward processes."""
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(REWARDS))
    (tmp_path / "broken_rewards.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "of_a_package.py").write_text("from .others import f\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "user_rewards"


PROMPT = Prompt(0, (1,), "p", {"answer": "a"})


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


async def test_each_failure_costs_one_sample_and_is_counted(rewards_module, caplog, tmp_path):
    log = tmp_path / "rewards.log"
    async with running(RewardConfig(kind=f"{rewards_module}:behave", timeout_s=5.0), log_path=log) as runner:
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
        assert ["ValueError" in one.message for one in caplog.records] == [True], (
            "whatever it quotes, it is of one kind"
        )
        # a place is held for seconds at most
        assert await rewards_of(runner, PROMPT, "close", "ok") == [None, 0.5]
        assert "close no descriptor that you did not open" in caplog.text
    assert log.stat().st_size > 1 << 22, "what rewards print"


def wait_until_stopped(pid: int) -> None:
    while b") T " not in Path(f"/proc/{pid}/stat").read_bytes():
        time.sleep(0.01)


async def test_a_process_that_reads_nothing_is_replaced_when_its_time_is_up(rewards_module, caplog):
    """A sample larger than what a socket buffers is written no further than its reader reads."""
    large = Prompt(1, (1,), "p", {"answer": "x" * (1 << 21)})
    async with running(RewardConfig(kind=f"{rewards_module}:behave", timeout_s=5.0)) as runner:
        (pid,) = await rewards_of(runner, large, "pid")
        assert pid is not None
        os.kill(int(pid), signal.SIGSTOP)
        wait_until_stopped(int(pid))
        assert await rewards_of(runner, large, "ok", "ok") == [None, 0.5]
        assert "read no question within reward.timeout_s=5 seconds" in caplog.text


@pytest.mark.parametrize("answer", [None, True, [1], {"a": 1}, float("nan")])
@pytest.mark.parametrize("kind", ["exact_match", "regex"])
def test_the_text_of_what_is_no_answer_is_not_compared_with(kind, answer):
    """As an agent's row may have it: no response is right, or wrong."""
    reward = load_reward(RewardConfig(kind=kind, pattern="(.*)")).function
    with pytest.raises(ValueError, match="an answer must be text or a number"):
        reward("p", str(answer), {"answer": answer})


async def test_several_processes_keep_the_order_of_rollouts(rewards_module):
    async with running(RewardConfig(kind=f"{rewards_module}:length", num_processes=2)) as runner:
        texts = ["x" * (i % 7) for i in range(40)]
        rewards = await rewards_of(runner, PROMPT, *texts)
        assert rewards == [float(len(text)) for text in texts]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"kind": "no_such_module:f"},
            "importing 'no_such_module' failed: ModuleNotFoundError.*put that folder on PYTHONPATH",
        ),
        ({"kind": "no/such/file.py:f"}, r"reward\.kind=no/such/file\.py:f: there is no file /.*/no/such/file\.py"),
        ({"kind": "FOLDER/broken_rewards.py:f"}, "importing .*no_such_package_at_all"),
        (
            {"kind": "FOLDER/of_a_package.py:f"},
            r"relative import.*; name its package: reward\.kind=\S+\.of_a_package:f, in /",
        ),
        ({"kind": "user_rewards:not_callable"}, "has no function 'not_callable'"),
        ({"kind": "regex", "pattern": "("}, r"reward\.pattern='\(' is not a regular expression"),
        ({"kind": "regex", "pattern": "a"}, "has no group"),
    ],
)
def test_a_reward_that_cannot_run_is_refused_before_the_run(rewards_module, tmp_path, config, message):
    config["kind"] = config["kind"].replace("FOLDER", str(tmp_path))
    with pytest.raises(RewardError, match=message):
        check_reward(RewardConfig(**config))


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


NEIGHBOUR = "WORTH = 0.25\n"
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
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    digest = hashlib.sha256(IN_A_FILE.encode()).hexdigest()
    for start, path in ((elsewhere, folder / "json.py"), (folder, Path("json.py")), (tmp_path, Path("mine/json.py"))):
        monkeypatch.chdir(start)
        caplog.set_level(logging.INFO, "slipstream.conf.functions")
        async with running(RewardConfig(kind=f"{path}:score"), log_path=tmp_path / "rewards.log") as runner:
            assert await rewards_of(runner, PROMPT, "a") == [0.25]
        assert (tmp_path / "reward_source.py").read_text() == IN_A_FILE
        assert f"{folder / 'json.py'}, sha256 {digest}" in caplog.text
