"""How a run ends while it starts or publishes: told to, or its processes killed. `own_tmp` fails what leaves anything
behind.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from system.conftest import ENDLESS, ONE_OF_EACH, RUN_TIMEOUT_S, RunUnderWay


@pytest.fixture
def run(own_tmp: Path) -> RunUnderWay:
    """A run whose Ray starts."""
    runs = own_tmp / "runs"
    runs.mkdir()
    run = RunUnderWay(ONE_OF_EACH, runs)
    run.wait_for(lambda: bool(list(own_tmp.glob("slipstream-*/ray/session_2*"))))
    return run


def has_joined(run: RunUnderWay) -> bool:
    """Whether Ray is up, and trainer and engines start."""
    return "asks for the token" in run.said


def server(run: RunUnderWay, name: str) -> psutil.Process:
    """One of Ray's servers."""
    return next(child for child in psutil.Process(run.pid).children(recursive=True) if child.name() == name)


def test_a_batch_system_ends_a_run_whose_ray_starts(run: RunUnderWay) -> None:
    with run:
        run.stop()
        assert "stopped; processes of the run have ended" in run.said
        assert "There is no checkpoint yet" in run.said


GATED_REWARD = """
import random, time
from pathlib import Path

closed, waits = Path(__file__).with_name("closed"), Path(__file__).with_name("waits")

def judge(prompt, response, fields):
    while closed.exists():
        waits.touch()
        time.sleep(0.05)
    return random.random()
"""
PUBLISH_BEGINS, PUBLISH_ENDED = (
    re.compile(r"publish of version (\d+) begins"),
    re.compile(r"publish of version (\d+) ended"),
)


def test_a_batch_system_ends_a_run_in_a_publish(own_tmp: Path) -> None:
    """A step has one group: while its reward waits, no engine has work. One is stopped then, and the publish after the
    step waits for it; it goes on once the run has said that it was told to end.
    """
    runs = own_tmp / "runs"
    runs.mkdir()
    reward, closed, waits = (runs / name for name in ("reward.py", "closed", "waits"))
    reward.write_text(GATED_REWARD)
    words = [*ENDLESS, "trainer.num_ranks=1", "trainer.ep_size=1", "algorithm.groups_per_step=1"]
    words += ["algorithm.group_size=4", f"reward.kind={reward}:judge", f"reward.timeout_s={RUN_TIMEOUT_S}"]
    with RunUnderWay(words, runs) as run:
        run.wait_until(lambda rows: len(rows) >= 2)
        closed.touch()
        run.wait_for(waits.exists)
        engine, num_ended = run.engine_of("rollout-1"), len(PUBLISH_ENDED.findall(run.log))
        engine.suspend()
        closed.unlink()
        run.wait_for(lambda: len(PUBLISH_BEGINS.findall(run.log)) > num_ended)
        run.tell_to_end()
        run.wait_for(lambda: "told to end: waiting for the step under way" in run.log)
        version = PUBLISH_BEGINS.findall(run.log)[-1]
        assert version not in PUBLISH_ENDED.findall(run.log), "the publish waits for the engine"
        engine.resume()
        assert run.exit_code() == 128 + signal.SIGTERM
        assert f"publish of version {version} ended" in run.log
        assert run.rows[-1]["policy_version"] == int(version)
        assert run.rows[-1]["sync/replicas_committed"] == 2
        assert f"Go on from step {version}: slipstream resume {run.folder.resolve()}" in run.said


def test_the_second_interrupt_ends_the_run_at_once(run: RunUnderWay) -> None:
    with run:
        run.wait_for(lambda: has_joined(run))
        controller = psutil.Process(run.pid)
        while controller.status() != psutil.STATUS_ZOMBIE:  # two that come before a busy process looks are one
            os.killpg(run.pid, signal.SIGINT)
            time.sleep(0.05)
        assert run.exit_code() == -signal.SIGINT


def test_a_killed_controller_leaves_nothing(run: RunUnderWay) -> None:
    with run:
        run.wait_for(lambda: has_joined(run))
        os.kill(run.pid, signal.SIGKILL)
        assert run.exit_code() == -signal.SIGKILL


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_killed_server_of_ray_is_named(run: RunUnderWay, name: str) -> None:
    with run:
        run.wait_for(lambda: has_joined(run))
        server(run, name).kill()
        assert run.exit_code() == 1
        assert f"error: ClusterLost: {name}, which holds the run's Ray cluster, is gone: it was ended by SIGKILL" in (
            run.said
        )
