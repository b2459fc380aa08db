"""Programs in a cell of the sandbox, and what they leave on the machine."""

import ast
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from slipstream.rollout.sandbox.sandbox import Ended, Limits, SandboxUnavailable, check_available, run

PATIENT = {"wall_s": 60.0, "cpu_s": 60.0}


def attack(code: str, *, stdin: str = "", **limits: Any) -> Ended | None:
    """How the program ended; None where the machine has no cells, after a look at the refusal."""
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    try:
        check_available()
    except SandboxUnavailable as e:
        with pytest.raises(SandboxUnavailable, match=re.escape(str(e).partition(":")[0])):
            run(argv, stdin=stdin, limits=Limits(**(PATIENT | limits)))
        return None
    return run(argv, stdin=stdin, limits=Limits(**(PATIENT | limits)))


def found(code: str, **limits: Any) -> Any:
    """The value that the program prints with repr; None where the machine has no cells."""
    ended = attack(code, **limits)
    if ended is None:
        return None
    assert (ended.status, ended.limit) == (0, ""), ended.stderr.decode()[-1000:]
    return ast.literal_eval(ended.stdout.decode())


def processes_with(mark: str) -> list[str]:
    """Command lines of this machine's processes that have a word in them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
            if mark in line and b") Z " not in (folder / "stat").read_bytes():
                found.append(line)
        except OSError:
            continue
    return found
