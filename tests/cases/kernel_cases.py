"""Each Triton kernel beside its torch definition: one function a case, which asserts.

tests/unit/trainer/kernels/test_kernels.py runs them on the CPU under Triton's interpreter, in a process of its own
because the switch is read at import: `python -m cases.kernel_cases`. tests/gpu/test_kernels_cuda.py runs them natively.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

from cases import change_kernel_cases, expert_kernel_cases, model_kernel_cases

CASES: dict[str, Callable[[str], None]] = {
    name.removeprefix("case_"): case
    for module in (change_kernel_cases, expert_kernel_cases, model_kernel_cases)
    for name, case in vars(module).items()
    if name.startswith("case_")
}


def main() -> None:
    """Run every case on the CPU; one JSON object of name -> traceback, "" when it passed."""
    results = {}
    for name, case in CASES.items():
        try:
            case("cpu")
            results[name] = ""
        except Exception:  # noqa: BLE001 - every case is tried, and told
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
