"""What a process leaves when a signal ends it: the Python frames of all its threads, in a file of its own.

    each process of a run         report_crashes(folder / "trainer-1"): Python's faulthandler writes there, and only
                                  where the process dies of SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL
    processes that it starts      report_beside_parent(): folder / "rollout-0-EngineCore.txt"
    whoever notices the end       death_in(folder / "trainer-1"): a sentence for people, from the file

Owns: these files and how they are read. A process that was ended by SIGKILL leaves no word. Invariant: a folder that
cannot be written keeps no process from its work.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import resource
import signal
import sysconfig
import time
from collections.abc import Generator, Iterable
from pathlib import Path

PARENT_VARIABLE = "SLIPSTREAM_CRASH_REPORT"
"""Environment variable: the path of this process's report, without its ending, for processes that it starts."""
COMMAND = "command"
_ROOT = Path(__file__).parents[1]
_STANDARD = sysconfig.get_path("stdlib") + "/"
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) 0x\w+.* \(most recent call first\):\n((?:  .*\n?)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def report_crashes(report: Path) -> None:
    """Let this process write its report there when it dies; `report` has no suffix. The report of an earlier process of
    that name is kept beside it. Call it again after a library is loaded that puts its own handlers first."""
    os.environ[PARENT_VARIABLE] = str(report)
    _report_to(_file_of(report))


def report_beside_parent() -> None:
    """Report a crash of this process if multiprocessing started it for one that reports; the file has the names of
    both."""
    if parent := os.environ.get(PARENT_VARIABLE):
        _report_to(_file_of(Path(f"{parent}-{multiprocessing.current_process().name}")))


def _file_of(report: Path) -> Path:
    return report.with_name(f"{report.name}.txt")


def _report_to(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.stat().st_size:
            path.rename(f"{path}.{time.strftime('%Y%m%d-%H%M%S', time.localtime(path.stat().st_mtime))}")
        faulthandler.disable()  # so that it puts its handlers before those of libraries that came meanwhile
        faulthandler.enable(path.open("w"))  # which keeps the file open


@contextlib.contextmanager
def command_reports_crashes(folder: Path) -> Generator[None]:
    """Report a crash of a run's command while the block runs, and then remove what has no report: by the end of the
    block all processes of the run have ended."""
    report_crashes(folder / COMMAND)
    try:
        yield
    finally:
        del os.environ[PARENT_VARIABLE]
        drop_empty_reports(folder)


def drop_empty_reports(folder: Path) -> None:
    """Remove the files of processes that did not die of a signal, once all have ended."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.txt"):
            if not path.stat().st_size:
                path.unlink()
        folder.rmdir()


def death_of_a_child() -> str:
    """How a process died that this one has started through multiprocessing, as death_in() says it."""
    parent = os.environ.get(PARENT_VARIABLE)
    return "" if parent is None else _death_in(Path(parent).parent.glob(f"{Path(parent).name}-*.txt"))


def death_in(report: Path) -> str:
    """How the process died that reports there: "died of SIGSEGV (main thread in trainer/rank.py:123, ...); ...". Empty:
    no report says so. Notes in the file whether there is a core."""
    return _death_in([_file_of(report)])


def _death_in(files: Iterable[Path]) -> str:
    for path in files:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if how := _how(text):
            if "\ncore: " not in text:
                with contextlib.suppress(OSError):  # it may be another user's
                    path.write_text(f"{text.rstrip()}\n\ncore: {_core()}\n")
            return f"{how}; frames of all threads: {path}"
    return ""


def _how(text: str) -> str:
    fatal = _FATAL.search(text)
    if fatal is None:
        return ""
    died = f"died of {_SIGNALS.get(fatal[1], fatal[1])}"
    threads = [(kind == "Current thread", _FRAME.findall(frames)) for kind, frames in _THREAD.findall(text)]
    dying = [(frames, index == len(threads) - 1) for index, (is_dying, frames) in enumerate(threads) if is_dying]
    if not dying or not dying[0][0]:
        return f"{died} (a native thread, without Python frames)"
    frames, is_main = dying[0]  # the main thread is listed last
    others = [frame for frame in frames if not frame[0].startswith(_STANDARD) or "site-packages" in frame[0]]
    ours = [frame for frame in frames if frame[0].startswith(f"{_ROOT}/") and "site-packages" not in frame[0]]
    innermost = dict.fromkeys([(others or frames)[0], *ours[:1]])  # of all libraries, and of this one
    places = "; ".join(f"{_short(path)}:{line}, {function}" for path, line, function in innermost)
    return f"{died} ({'main thread' if is_main else 'another thread'} in {places})"


def _short(path: str) -> str:
    return path.rpartition("site-packages/")[2].removeprefix(f"{_ROOT}/")


def _core() -> str:
    """Where the kernel keeps cores, or how it would."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if resource.getrlimit(resource.RLIMIT_CORE)[0] == 0 and not pattern.startswith("|"):
        return f"none is kept; `ulimit -c unlimited` before the command lets the kernel write one ({pattern})"
    return f"the kernel writes it to {pattern} (core_pattern; a relative path is of the process's folder)"


def how_it_ended(exit_code: int | None) -> str:
    """In words. multiprocessing has the negative number of a signal for a process that it ended; None: not known."""
    if exit_code is None:
        return "has ended"
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
