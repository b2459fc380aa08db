"""How a run ends while it starts: told to, or its processes killed. `own_tmp` fails what leaves anything behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from system.conftest import RunUnderWay


@pytest.fixture
def run(own_tmp: Path) -> RunUnderWay:
    """A run whose Ray starts."""
    runs = own_tmp / "runs"
    runs.mkdir()
    run = RunUnderWay([], runs)
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
