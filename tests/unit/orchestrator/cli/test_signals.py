"""How a command ends that is told to: by signals, and by terminals and readers that have gone."""

import asyncio
import errno
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.command import READY, called, fake_run

from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.cli.start_commands import AT_ONCE

pytestmark = pytest.mark.usefixtures("somewhere_else")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_that_still_looks_at_files(
    signum: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "slipstream.orchestrator.inputs.preflight.run_preflight", lambda config: signal.raise_signal(signum)
    )
    assert main(READY) == code
    assert capsys.readouterr().err == f"{AT_ONCE}\n\nstopped.\n"


def test_an_interrupt_while_modules_are_imported_ends_with_a_line() -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.startswith('slipstream.orchestrator.cli.') and not name.endswith('.main'):\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from slipstream.orchestrator.cli.main import main\n"
        "sys.exit(main(['--version']))\n"
    )
    ended = called([sys.executable, "-c", code])
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "\nstopped.\n")


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_wind_the_run_down(
    signum: signal.Signals,
    code: int,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wound_down: list[bool] = []

    async def train() -> None:
        try:
            signal.raise_signal(signum)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # teardown may await: the loop still runs
            wound_down.append(True)

    def run(*_: Any) -> None:
        if is_async:
            asyncio.run(train())
            return
        try:
            signal.raise_signal(signum)
        finally:
            wound_down.append(True)

    before = signal.getsignal(signal.SIGTERM)
    fake_run(monkeypatch, run)
    assert main(READY) == code
    assert wound_down
    assert "Traceback" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_background_job_that_ignores_interrupts_can_be_wound_down() -> None:
    """A shell starts `command &` with SIGINT ignored; asyncio then installs no handler of its own. One process that has
    imported what a run needs is forked for each signal.
    """
    program = (
        "import asyncio, os, signal, sys, types\n"
        "from slipstream.orchestrator.cli.main import main\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # these tests may run under nohup
        "async def train(signum):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signum)\n"
        "        await asyncio.wait_for(asyncio.Event().wait(), 30)\n"
        "    finally:\n"
        "        await asyncio.sleep(0)\n"
        "        print(signum, 'wound down', flush=True)\n"
        f"assert main({[*READY, '--dry-run']!r}) == 0\n"
        "module = sys.modules['slipstream.orchestrator.run'] = types.ModuleType('slipstream.orchestrator.run')\n"
        "for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "    module.run = lambda *_: asyncio.run(train(signum))\n"
        "    if not (child := os.fork()):\n"
        f"        os._exit(main({READY!r}))\n"
        "    print(signum, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    done = called(["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", program])
    said = "2 wound down\n2 130\n15 wound down\n15 143\n1 wound down\n1 129\n"
    assert (done.returncode, done.stdout[-len(said) :]) == (0, said), done.stderr


def test_nohup_survives_a_hangup(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fake_run(monkeypatch, lambda *_: signal.raise_signal(signal.SIGHUP))
        assert main(READY) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("x"), 1)])
def test_a_terminal_that_has_gone_leaves_the_exit_code(
    error: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def flush(self) -> None:
            self.write("")

        def fileno(self) -> int:
            return nowhere.fileno()

    nowhere = (tmp_path / "nowhere").open("w")
    fake_run(monkeypatch, Mock(side_effect=error))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Gone())
    assert main(READY) == code


def test_a_reader_that_has_gone_is_no_error() -> None:
    """`slipstream doctor | head -3` in a script that looks at exit codes. rich has an opinion of its own on it."""
    reader, writer = os.pipe()
    os.close(reader)
    code = (
        "import sys; from slipstream.orchestrator.cli import doctor, main\n"
        "doctor.gather = lambda *_: [doctor.Finding('limits', 'files', '10', doctor.Status.ok)] * 99\n"
        "sys.exit(main.main(['doctor']))"
    )
    done = called([sys.executable, "-c", code], stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "looking at this machine\n")


@pytest.mark.parametrize("buffered", ["", "1"])
def test_an_output_without_room_is_named_and_a_closed_one_is_no_error(buffered: str) -> None:
    command = [sys.executable, "-m", "slipstream", "--help"]
    with open("/dev/full", "w") as full:
        done = called(command, stdout=full, PYTHONUNBUFFERED=buffered)
    told = "error: /dev/full cannot be written: No space left on device; make room, or write to another disk\n"
    assert (done.returncode, done.stderr) == (1, told)
    done = called(["sh", "-c", '"$@" >&-', "sh", *command], PYTHONUNBUFFERED=buffered)
    assert (done.returncode, done.stderr) == (0, "")


def test_processes_of_a_command_whose_input_and_outputs_are_closed_have_them() -> None:
    """Or a file that is opened later is what they print to."""
    look = "os._exit(os.system('cd /proc/self/fd && test -e 0 && test -e 1 && test -e 2') != 0)"
    code = f"import os; from slipstream.orchestrator.cli.main import main; main(['-h']); {look}"
    assert called(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]).returncode == 0


def test_what_the_locale_cannot_write_is_escaped(tmp_path: Path) -> None:
    run = tmp_path / "l\u00e4uft"
    run.mkdir()
    (run / "config.yaml").write_text("run: {num_steps: 9}")
    command = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "status", str(run)]
    done = called(command, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "/l\\xe4uft" in done.stdout
