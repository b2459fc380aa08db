"""Rewards that attack the exchange or leave processes behind: one sample each, nothing runs here, nothing is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from fakes import reward_runs
from fakes.reward_runs import rewards_of

from slipstream.conf.schema import RewardConfig
from slipstream.rollout.types import Prompt

REWARDS = r"""
import json, os, pickle, struct, subprocess, sys, time
import msgpack

def connection():
    return int(sys.argv[1])

def framed(payload):
    if not isinstance(payload, bytes):
        payload = msgpack.packb(payload)
    return struct.pack(">I", len(payload)) + payload

class Planted:
    def __reduce__(self):
        return open, (os.path.join(os.path.dirname(__file__), "planted"), "w")

WRITTEN = {
    "garbage": b"\xff" * 64,
    "no message": framed(b"\xc1\x00["),
    "a deep message": framed(b"\x91" * 60_000),
    "a huge number": framed([1, [["score", msgpack.ExtType(1, b"1" + b"0" * 4000)]], {}]),
    "digits that are none": framed([1, [["score", msgpack.ExtType(1, b"7" * 60_000)]], {}]),
    "an unknown extension": framed([1, [["score", msgpack.ExtType(9, b"")]], {}]),
    "no answer": framed({}),
    "no number": framed([1, [["score", float("nan")]], {}]),
    "a number of another kind": framed([1, [["score", True]], {}]),
    "pickle": framed(pickle.dumps(Planted())),
    "bare pickle": pickle.dumps(Planted()),
    "1 GB": struct.pack(">I", 1 << 30),
    "half": struct.pack(">I", 100) + b"[",
}

def vandal(prompt, response, fields):
    if response in WRITTEN:
        os.write(connection(), WRITTEN[response])
    if response == "1 GB":
        for _ in range(1 << 10):
            os.write(connection(), bytes(1 << 20))
    if response == "half":
        time.sleep(600)
    if response == "forged":
        os.write(connection(), framed([1, [["score", 1000.0]], {}]))
    return 0.5

DAEMON = (
    "import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0);"
    "open({path!r}, 'a').write(f'{{os.getpid()}}\\n'); os.execlp('sleep', 'sleep', '600')"
)

CHAIN = (
    "import os, time\nline, last = [os.getpid()], time.monotonic() + 40\n"
    "open({path!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    "while time.monotonic() < last:\n"
    "    line = [pid for pid in line if os.path.exists(f'/proc/{{pid}}')]\n"
    "    if len(line) < 20 and os.fork():\n"
    "        time.sleep(40)\n"
    "        break\n"
    "    line = sorted({{*line, os.getpid()}})\n"
)

def fork_on(prompt, response, fields):
    # a chain of processes that grows at its end while its beginning is killed
    pids = os.path.join(os.path.dirname(__file__), "pids")
    subprocess.Popen([sys.executable, "-c", CHAIN.format(path=pids)])
    while not os.path.exists(pids):
        time.sleep(0.01)
    time.sleep(1)
    return 0.5

def leave_children(prompt, response, fields):
    pids = os.path.join(os.path.dirname(__file__), "pids")
    open(pids, "a").close()
    noted = os.path.getsize(pids)
    subprocess.run([sys.executable, "-c", DAEMON.format(path=pids)], check=True)
    while os.path.getsize(pids) == noted:
        time.sleep(0.01)
    if response == "new session":
        with open(pids, "a") as file:
            print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, file=file)
    if response == "hang":
        time.sleep(600)
    if response == "exit":
        os._exit(0)
    return 0.5

def environment(prompt, response, fields):
    with open(os.path.join(os.path.dirname(__file__), "environment"), "w") as file:
        json.dump(dict(os.environ), file)
    return 0.5
"""
ATTACKS = (
    "garbage", "no message", "a deep message", "a huge number", "digits that are none", "an unknown extension",
    "no answer", "no number", "a number of another kind", "pickle", "bare pickle", "1 GB",
)  # fmt: skip
PROMPT = Prompt(0, (1,), "p", {})
Score = Callable[..., Awaitable[list[float | None]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hostile.py").write_text(textwrap.dedent(REWARDS))
    return tmp_path


@asynccontextmanager
async def running(folder: Path, name: str, *, timeout_s: float = 30.0) -> AsyncIterator[Score]:
    config = RewardConfig(kind=f"{folder / 'hostile.py'}:{name}", timeout_s=timeout_s)
    async with reward_runs.running(config, log_path=folder / "rewards.log") as runner:
        yield partial(rewards_of, runner, PROMPT)


async def test_what_a_reward_writes_to_its_connection_costs_one_sample_and_runs_nothing(folder, caplog):
    async with running(folder, "vandal") as score:
        for attack in ATTACKS:
            assert await score(attack, "good", "good") == [None, 0.5, 0.5], attack
    assert {one.message.partition(";")[0] for one in caplog.records if "failed" in one.message} == {
        "reward vandal failed (garbled) on prompt 0"
    }
    assert not (folder / "planted").exists()


async def test_half_an_answer_costs_one_sample_when_its_time_is_up(folder, caplog):
    async with running(folder, "vandal", timeout_s=1.0) as score:
        assert await score("half") == [None]
    assert "reward vandal failed (timeout) on prompt 0" in caplog.text


async def test_an_answer_too_many_never_becomes_the_score_of_another_sample(folder):
    async with running(folder, "vandal") as score:
        assert await score("forged") == [1000.0]  # it could have returned that
        assert await score("good") in ([None], [0.5])  # lost if it came before the answer too many was noticed
        assert await score("good", "good") == [0.5, 0.5]


def left_alive(folder: Path) -> list[int]:
    """Processes that a reward left, by the pids that it noted."""
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert pids
    return [pid for pid in pids if not has_ended(pid)]


def has_ended(pid: int) -> bool:
    try:
        return b") Z " in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("how", ["daemon", "new session"])
async def test_processes_that_a_reward_leaves_end_with_the_run(folder, how):
    async with running(folder, "leave_children") as score:
        assert await score(how, how) == [0.5, 0.5]
        assert len(left_alive(folder)) >= 2
    assert left_alive(folder) == []


async def test_processes_that_start_others_while_they_are_ended_end_with_the_run(folder):
    async with running(folder, "fork_on") as score:
        assert await score("any") == [0.5]
        group = os.getpgid(int((folder / "pids").read_text()))
    assert [one.pid for one in psutil.process_iter() if in_group(one.pid, group)] == []


def in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


@pytest.mark.parametrize("how", ["hang", "exit"])
async def test_processes_of_a_reward_that_is_replaced_end_with_it(folder, how):
    async with running(folder, "leave_children", timeout_s=5.0) as score:
        assert await score(how) == [None]
        assert left_alive(folder) == []


def test_processes_that_a_reward_leaves_end_with_a_run_that_is_killed(folder):
    code = f"""
import asyncio
from slipstream.conf.schema import RewardConfig
from slipstream.rollout.rewards.runner import RewardRunner
from slipstream.rollout.types import Prompt, Rollout
async def main():
    runner = RewardRunner(RewardConfig(kind={str(folder / "hostile.py")!r} + ":leave_children"))
    await runner.start()
    rollouts = [Rollout([5], [0.0], [0], "new session", "stop")]
    print((await runner.score_group(Prompt(0, (1,), "p", {{}}), rollouts))[0].reward, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"0.5\n"
    assert left_alive(folder)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    while left_alive(folder):
        time.sleep(0.01)


async def test_a_reward_gets_no_variable_but_what_programs_need_and_what_it_is_promised(folder, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "of the judge")
    monkeypatch.setenv("HF_TOKEN", "of the owner")
    monkeypatch.setenv("LANG", "C.UTF-8")
    config = RewardConfig(kind=f"{folder / 'hostile.py'}:environment", env=("JUDGE_API_KEY",))
    async with reward_runs.running(config) as runner:
        assert await rewards_of(runner, PROMPT, "") == [0.5]
    seen = (folder / "environment").read_text()
    assert "of the judge" in seen
    assert "C.UTF-8" in seen
    assert "of the owner" not in seen
