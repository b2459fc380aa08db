"""How a run ends while it starts or publishes: told to, or its processes killed. `nothing_left` fails what
leaves anything behind. And what another user of the machine gets from a run that goes on.
"""

import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from cases.another_user import REFUSED, attempts_beside
from system.conftest import (
    ENDLESS,
    ONE_OF_EACH,
    HeldReward,
    RunUnderWay,
    assert_all_end,
    dashboard_beside_another,
    nothing_left,
    trainer_ranks,
)

from slipstream.orchestrator.cli.status import status_of
from slipstream.orchestrator.run import TOLD_TO_END

TAUGHT = ["experiment=sft_quickstart", "run.num_steps=1000", "trainer.num_ranks=1", "trainer.ep_size=1"]
"""A run without engines, which lets no process import vLLM, and that goes on for longer than anybody looks at it."""


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[RunUnderWay]:
    """A run whose Ray starts; of the words that a test gives, or of one trainer rank and one engine."""
    with nothing_left() as tmp:
        runs = tmp / "runs"
        runs.mkdir()
        run = RunUnderWay(getattr(request, "param", ONE_OF_EACH), runs)
        run.wait_for(lambda: bool(list(tmp.glob("slipstream-*/ray/session_2*"))))
        yield run


def processes(run: RunUnderWay, name: str) -> list[psutil.Process]:
    """A run's, whose names begin so; parents come first."""
    found: list[psutil.Process] = []
    for child in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [child] if child.name().startswith(name) else []
    return found


def has_joined(run: RunUnderWay) -> bool:
    """Whether Ray is up, and the trainer starts, with the engine if there is one."""
    return bool(processes(run, "ray::Train"))


def test_a_batch_system_ends_a_run_whose_ray_starts(run: RunUnderWay) -> None:
    with run:
        run.stop()
        assert "stopped; processes of the run have ended" in run.said
        assert "There is no checkpoint" in run.said and TOLD_TO_END in run.said


PUBLISH_BEGINS, PUBLISH_ENDED = (
    re.compile(r"publish of version (\d+) begins"),
    re.compile(r"publish of version (\d+) ended"),
)


@dataclass(frozen=True)
class EndedInAPublish:
    """A run that was told to end while its publish waited for an engine."""

    exit_code: int
    folder: Path
    checkpoints: list[str]
    said: str
    log_when_told: str
    """When it had said that it was told to end."""
    log: str
    last_row: dict[str, Any]
    attempts: dict[str, int | str]
    """What came of another user's; nothing where this user cannot become another one."""
    kept_calls: list[dict[str, Any]]
    """What Ray's page lists of calls of actors, after two steps."""


@pytest.fixture(scope="module")
def ended_in_a_publish() -> EndedInAPublish:
    """A step has one group: while its reward waits, the engine has no work. Another user comes then. The engine is
    stopped, and the publish after the step waits for it; it goes on once the run has said that it was told to end.
    """
    few_calls = mock.patch.dict(os.environ, RAY_task_events_max_num_task_in_gcs="5")
    with nothing_left() as tmp, dashboard_beside_another() as dashboard, few_calls:
        runs = tmp / "runs"
        runs.mkdir()
        reward = HeldReward(runs)
        words = [*ENDLESS, *ONE_OF_EACH, "algorithm.groups_per_step=1", "algorithm.group_size=4", dashboard]
        words += [*reward.words, "weight_sync.timeout_s=500"]
        with RunUnderWay(words, runs) as run:
            run.wait_until(lambda rows: len(rows) >= 2)
            reward.hold()
            reward.wait_until_held(run)
            attempts = attempts_beside(run.said, run.folder) if os.geteuid() == 0 else {}
            run.wait_for(lambda: listed_calls(run.said))  # processes report them once a second
            server = run.worker("rollout-0").parent()
            host = psutil.Process(server.ppid() if server else None)
            assert "slipstream.orchestrator.cluster.ray_host" in host.cmdline(), "the fork server was begun before Ray"
            engine, num_ended = run.engine_of("rollout-0"), len(PUBLISH_ENDED.findall(run.log))
            engine.suspend()
            reward.let_go()
            run.wait_for(lambda: len(PUBLISH_BEGINS.findall(run.log)) > num_ended)
            kept_calls: list[dict[str, Any]] = []
            run.wait_for(lambda: bool(kept_calls.extend(listed_calls(run.said)) or kept_calls))  # the same
            run.tell_to_end()
            run.wait_for(lambda: "told to end: waiting for the step under way" in run.log)
            log_when_told = run.log
            engine.resume()
            exit_code = run.exit_code()
        checkpoints = [path.name for path in (run.folder / "checkpoints").iterdir()]
        ended = EndedInAPublish(
            exit_code, run.folder.resolve(), checkpoints, run.said, log_when_told, run.log, run.rows[-1], attempts,
            kept_calls,
        )  # fmt: skip
        assert not attempts or (tmp / "slipstream-planted").is_dir(), "another user's folder is not the run's to remove"
    return ended


def listed_calls(said: str) -> list[dict[str, Any]]:
    """None while the page's server is too busy to answer. `said`: what the run's terminal shows."""
    ((port, token),) = re.findall(r"Ray dashboard: http://127.0.0.1:(\d+) asks for the token in (\S+)", said)
    headers = {"authorization": f"Bearer {Path(token).read_text()}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v0/tasks", headers=headers)
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["data"]["result"]["result"]
    return []


def test_a_batch_system_ends_a_run_in_a_publish(ended_in_a_publish: EndedInAPublish) -> None:
    ended = ended_in_a_publish
    version = PUBLISH_BEGINS.findall(ended.log_when_told)[-1]
    assert version not in PUBLISH_ENDED.findall(ended.log_when_told), "the publish waits for the engine"
    assert ended.exit_code == 128 + signal.SIGTERM
    assert f"publish of version {version} ended" in ended.log
    assert ended.last_row["policy_version"] == int(version)
    assert ended.last_row["sync/replicas_committed"] == 1
    assert ended.checkpoints == [f"step-{version:0>6}"]
    assert f"Step {version} is saved; go on with: slipstream resume {ended.folder}" in ended.said
    assert re.search(r"Ray dashboard: http://127.0.0.1:\d+ asks for the token in \S+ \(8265 is taken\)", ended.said)


def test_ray_lists_as_few_calls_as_it_is_told(ended_in_a_publish: EndedInAPublish) -> None:
    assert 0 < len(ended_in_a_publish.kept_calls) <= 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, which is what this tests")
def test_another_user_of_the_machine_is_refused(ended_in_a_publish: EndedInAPublish) -> None:
    assert ended_in_a_publish.attempts == REFUSED


@pytest.mark.parametrize("run", [TAUGHT], indirect=True)
def test_the_second_interrupt_ends_the_run_at_once(run: RunUnderWay) -> None:
    """The command dies on the spot, as one that is killed does: what it started ends by itself."""
    with run:
        run.wait_for(lambda: has_joined(run))
        controller = psutil.Process(run.pid)
        while controller.status() != psutil.STATUS_ZOMBIE:  # two that come before a busy process looks are one
            os.killpg(run.pid, signal.SIGINT)
            time.sleep(0.05)
        assert run.exit_code() == -signal.SIGINT
        assert status_of(run.folder).state == "stopped"


@pytest.mark.parametrize("run", [TAUGHT], indirect=True)
def test_a_killed_server_of_ray_is_named(run: RunUnderWay) -> None:
    kill_server(run, "raylet")


def kill_server(run: RunUnderWay, name: str) -> None:
    """Of its two; the other one: tests/long."""
    with run:
        run.wait_for(lambda: has_joined(run))
        started = processes(run, "")
        processes(run, name)[0].kill()
        assert run.exit_code() == 1
        assert_all_end(started)  # where Ray ends the command with it, the server's host says why, and ends after it
        assert f"error: ClusterLost: {name}, which holds the run's Ray cluster, is gone: it was ended by SIGKILL" in (
            run.said
        )
        assert f"ClusterLost: {name}, which holds" in (status_of(run.folder).error or "")


def test_a_rank_that_dies_of_a_signal_is_named_in_one_line_with_its_frames(cluster: str, tmp_path: Path) -> None:
    """And not its peer, whose collective fails earlier than Ray tells of the death."""
    words = ["experiment=sft_quickstart", "run.num_steps=1000", "trainer.max_restarts=0", cluster]
    with RunUnderWay(words, tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 1)
        trainer_ranks(run.folder)[0].send_signal(signal.SIGSEGV)
        assert run.exit_code() == 1
        (report,) = (run.folder / "crash").resolve().iterdir()
        (line,) = [line for line in run.said.splitlines() if line.startswith("error: ")]
        where = r"(main|another) thread in \S+:\d+, [\w<>]+(; \S+:\d+, [\w<>]+)?|a native thread, without Python frames"
        dead = re.fullmatch(
            rf"error: TrainingStopped: (trainer-[01]) died of SIGSEGV \(({where})\); .*: {report}", line
        )
        assert dead, run.said
        assert report.name == f"{dead[1]}.txt"
        text = report.read_text()
        assert "Fatal Python error: Segmentation fault" in text
        assert "trainer/rank.py" in text or "ray/_private" in text
        assert re.search(r"^core: ", text, re.MULTILINE)
        assert "potential root causes" not in run.said
        assert run.said.count(report.name) == 1, run.said
