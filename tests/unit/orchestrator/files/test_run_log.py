"""Locks: what the log and the progress line of a run say."""

import logging
import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from slipstream.orchestrator.files.run_log import ProgressLine, RunLog


def test_progress_line_fits_the_terminal() -> None:
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
