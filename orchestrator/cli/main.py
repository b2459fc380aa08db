"""The `slipstream` command, from its first moment on: also while its modules are imported, Ctrl-C ends it with a line.

Owns: that moment. Does not own: anything later (commands.py). Invariant: importing this module imports no other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code (exit.py)."""
    for descriptor in range(3):  # one that is closed would be a file of ours, and processes would print into it
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    try:
        from slipstream.orchestrator.cli.commands import carry_out
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped.\n")
        return 130
    return carry_out(list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
