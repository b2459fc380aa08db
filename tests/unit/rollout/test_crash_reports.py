"""What a process leaves that dies of a signal, and how that is told in one line."""

import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from slipstream.rollout.crash_reports import command_reports_crashes, death_in, drop_empty_reports, how_it_ended

ROOT = Path(__file__).parents[3]
PROGRAM = """
import ctypes, multiprocessing, os, signal, sys, threading
from pathlib import Path
from slipstream.rollout.crash_reports import death_of_a_child, report_beside_parent, report_crashes

def die(how):
    if how == "native thread":
        start = ctypes.CFUNCTYPE(None)
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
        threading.Event().wait(60)
    elif how == "thread":
        threading.Thread(target=lambda: ctypes.string_at(0)).start()
        threading.Event().wait(60)
    else:
        signal.raise_signal(signal.Signals[how])

def child(how):
    report_beside_parent()
    die(how)

if __name__ == "__main__":
    report_crashes(Path(sys.argv[1]))
    if sys.argv[2] == "child":
        process = multiprocessing.get_context("fork").Process(target=child, args=["SIGBUS"], name="EngineCore")
        process.start()
        process.join()
        print(process.exitcode, death_of_a_child())
    else:
        die(sys.argv[2])
"""


def run(report: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(report), how], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGSEGV", "died of SIGSEGV (main thread in <string>:16, die); frames of all threads: "),
        ("SIGABRT", "died of SIGABRT (main thread in <string>:16, die); frames of all threads: "),
        ("SIGFPE", "died of SIGFPE (main thread in <string>:16, die); frames of all threads: "),
        ("SIGILL", "died of SIGILL (main thread in <string>:16, die); frames of all threads: "),
        ("thread", "died of SIGSEGV (another thread in "),
        ("native thread", "died of SIGABRT (a native thread, without Python frames); frames of all threads: "),
    ],
)
def test_a_signal_its_thread_and_the_file_are_told(tmp_path: Path, how: str, said: str) -> None:
    report = tmp_path / "crash" / "trainer-1"
    assert run(report, how).returncode < 0
    told = death_in(report)
    assert told.startswith(said)
    assert told.endswith(f": {report}.txt")
    assert "\n" not in told
    text = Path(f"{report}.txt").read_text()
    assert "Thread 0x" in text or "thread 0x" in text
    assert text.count("\ncore: ") == 1
    assert death_in(report) == told
    assert Path(f"{report}.txt").read_text() == text


def test_a_child_has_a_report_beside_its_parents(tmp_path: Path) -> None:
    """And the parent's own stays empty, and is removed."""
    report = tmp_path / "rollout-0"
    said = run(report, "child").stdout
    assert said.startswith(f"-{int(signal.SIGBUS)} died of SIGBUS (main thread in <string>:16, die)")
    assert said.endswith(f"{report}-EngineCore.txt\n")
    assert death_in(report) == ""
    drop_empty_reports(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rollout-0-EngineCore.txt"]


def test_an_earlier_report_is_kept_and_told_no_more(tmp_path: Path) -> None:
    """As of a run that is resumed; a kill leaves no word."""
    report = tmp_path / "trainer-0"
    run(report, "SIGSEGV")
    run(report, "SIGKILL")
    assert death_in(report) == ""
    kept = [path for path in tmp_path.iterdir() if path.stat().st_size]
    assert [path.name.startswith("trainer-0.txt.") for path in kept] == [True]


def test_a_run_without_crashes_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    with command_reports_crashes(folder):
        assert [path.name for path in folder.iterdir()] == ["command.txt"]
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_keeps_nobody_from_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with command_reports_crashes(tmp_path / "file"):
        assert death_in(tmp_path / "file" / "command") == ""


@pytest.mark.parametrize(
    ("code", "said"), [(None, "has ended"), (3, "ended with exit code 3"), (-11, "was ended by SIGSEGV")]
)
def test_an_exit_code_in_words(code: int | None, said: str) -> None:
    assert how_it_ended(code) == said


def test_the_innermost_frames_of_a_library_and_of_ours_are_told(tmp_path: Path) -> None:
    """Not the standard library's, in which most threads wait; and of several threads that of the one that died."""
    standard, site = sysconfig.get_path("stdlib"), "/env/lib/python3.12/site-packages"
    (tmp_path / "trainer-0.txt").write_text(f"""Fatal Python error: Segmentation fault

Thread 0x00007fb3cd24d6c0 (most recent call first):
  File "{ROOT}/slipstream/trainer/rank.py", line 1 in other

Current thread 0x00007fb4707c8b80 (most recent call first):
  File "{standard}/threading.py", line 327 in wait
  File "{site}/torch/autograd/graph.py", line 870 in _engine_run_backward
  File "{ROOT}/slipstream/trainer/rank.py", line 245 in _over
  File "{ROOT}/slipstream/trainer/rank.py", line 200 in forward_backward

Extension modules: torch._C (total: 1)
""")
    where = "torch/autograd/graph.py:870, _engine_run_backward; trainer/rank.py:245, _over"
    assert death_in(tmp_path / "trainer-0").startswith(f"died of SIGSEGV (main thread in {where}); frames of all")
