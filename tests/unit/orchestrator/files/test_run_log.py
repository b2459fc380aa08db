"""What the log and the progress line of a run say; a start says what it waits for, in one line, and leaves what took
how long behind, also when it failed.
"""

import asyncio
import logging
import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from slipstream.orchestrator.files import startup as startup_module
from slipstream.orchestrator.files.run_log import ProgressLine, RunLog
from slipstream.orchestrator.files.startup import RUN, Span, Startup, describe, read_starts


def test_progress_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = StringIO()
    with ProgressLine(Console(file=shown, force_terminal=True, width=40)) as progress:
        progress.show(3, 10, "reward 1.000  [eval] 0.500  entropy 3.66  wait 0.50s", 65)
    lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", shown.getvalue())
    assert " step 3/10  left 1:05  reward 1.000  […" in lines
    assert "0.50s" not in shown.getvalue()


def test_run_log_carries_the_clock_and_leaves_the_loggers_as_they_were(tmp_path: Path) -> None:
    loggers = [logging.getLogger(name) for name in ("", "slipstream", "httpx")]
    before = [(one.level, list(one.handlers)) for one in loggers]
    with RunLog(tmp_path / "run.log", Console(file=StringIO())) as log:
        log.context.set(7, 6)
        logging.getLogger("orchestrator.test").info("hello")
        assert [one.level for one in loggers] == [logging.INFO, logging.DEBUG, logging.WARNING]
    assert "[step 7 v6] orchestrator.test: hello" in (tmp_path / "run.log").read_text()
    assert [(one.level, one.handlers) for one in loggers] == before


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_what_is_waited_for_is_said_and_what_took_how_long_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, shown = Clock(), list[tuple[float, str]]()
    monkeypatch.setattr(startup_module, "time", SimpleNamespace(process_time=lambda: 0.5 + clock.now_s / 4))
    startup = Startup(tmp_path / "startup.jsonl", lambda *said: shown.append(said), now_s=clock)
    clock.now_s = 1.0  # Python has imported this
    async with startup:
        await asyncio.sleep(0)
        clock.now_s = 2.0
        startup.enter(RUN, "Ray")
        assert startup.waits_for() == "Ray"
        clock.now_s = 5.0
        startup.enter(RUN, "trainer ranks and engines")
        startup.expect("trainer ranks", ["trainer-0"])
        startup.expect("engines", ["rollout-0", "rollout-1", "rollout-2"])
        startup.enter("trainer-0", "loading weights")
        clock.now_s = 6.0
        for name, what in (("rollout-0", "importing"), ("rollout-1", "building the model"), ("rollout-2", "importing")):
            startup.enter(name, what)
        startup.ready("trainer-0")
        assert startup.waits_for() == ("trainer ranks 1 of 1 up, engines 0 of 3 up (2 importing, 1 building the model)")
        clock.now_s = 16.0
        startup.enter("rollout-0", "importing")  # told again: nothing new
        startup.ready("rollout-0")
        startup.ready("rollout-2")
        assert startup.waits_for().endswith("engines 2 of 3 up (rollout-1: building the model)")
        clock.now_s = 20.0
        startup.ready("rollout-1")
        startup.enter(RUN, "the plan of transfers")
        assert startup.waits_for() == "the plan of transfers"
        clock.now_s = 21.0
    assert shown[0] == (1.0, "options and files")
    (row,) = read_starts(tmp_path / "startup.jsonl")
    assert Span("rollout-0", "importing", 6.0, 16.0) in row.spans
    assert [(span.who, span.cpu_s) for span in row.spans if span.cpu_s is not None] == [
        (RUN, 1.0), (RUN, 0.75), (RUN, 3.75), (RUN, 0.25)
    ], "the controller's own, phase by phase"  # fmt: skip
    assert describe(row) == [
        "start-up, 21.0 s: options and files 2.0, Ray 3.0, trainer ranks and engines 15.0, the plan of transfers 1.0",
        "slowest trainer, trainer-0: loading weights 1.0",
        "slowest rollout, rollout-1: waiting for a process 1.0, building the model 14.0",
    ]


async def test_a_start_that_fails_is_kept_up_to_there(tmp_path: Path) -> None:
    clock = Clock()
    with pytest.raises(ConnectionError):
        async with Startup(tmp_path / "startup.jsonl", lambda *_: None, now_s=clock) as startup:
            startup.enter(RUN, "Ray")
            clock.now_s = 60.0
            raise ConnectionError
    assert describe(*read_starts(tmp_path / "startup.jsonl")) == ["start-up, 60.0 s: Ray 60.0"]


async def test_a_worker_that_is_started_again_has_a_row_of_its_own(tmp_path: Path) -> None:
    clock = Clock()
    async with Startup(tmp_path / "startup.jsonl", lambda *_: None, now_s=clock) as startup:
        startup.end()  # as a run does when its loop begins
        clock.now_s = 100.0
        startup.enter("rollout-0.1", "importing vLLM")
        startup.enter("rollout-1.1", "importing vLLM")  # another one at the same time
        clock.now_s = 107.0
        startup.came_back("rollout-0.1")
        clock.now_s = 109.0
        startup.came_back("rollout-1.1")
    rows = read_starts(tmp_path / "startup.jsonl")
    assert [line for row in rows for line in describe(row)][-2:] == [
        "start of rollout-0.1, 7.0 s: importing vLLM 7.0",
        "start of rollout-1.1, 9.0 s: importing vLLM 9.0",
    ]
    assert len(rows) == 3, "the run's own row is written once"
    assert not startup._spans, "what is written is forgotten"


def test_off_a_terminal_it_is_a_line_where_it_changes_and_seldom(tmp_path: Path) -> None:
    clock, console = Clock(), Console(file=StringIO())
    said = [(0.0, "Ray"), (1.0, "Ray"), (6.0, "Ray"), (7.0, "engines 0 of 2 up"), (9.0, "engines 1 of 2 up")]
    with RunLog(tmp_path / "run.log", console), ProgressLine(console, clock) as progress:
        for clock.now_s, what in said:
            progress.wait(clock.now_s, what)
    expected = ["starting, 0 s: Ray", "starting, 7 s: engines 0 of 2 up"]
    assert console.file.getvalue().splitlines() == expected  # type: ignore[attr-defined]
    assert [line.split(": ", 1)[1] for line in (tmp_path / "run.log").read_text().splitlines()] == expected


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = StringIO()
    with ProgressLine(Console(file=shown, force_terminal=True, width=60)) as progress:
        for second in range(3):
            progress.wait(second, "Ray")
    assert "starting, 2 s: Ray" in shown.getvalue()
    assert "starting, 1 s: Ray\n" not in shown.getvalue()
