"""Each Triton kernel beside its torch definition: one function a case, which asserts.

tests/unit/trainer/kernels/test_kernels.py runs them on the CPU under Triton's interpreter, in a process of its own
because the switch is read at import: `python -m cases.kernel_cases`. tests/gpu/test_kernels_cuda.py runs them natively.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

from triton import language
from triton.runtime import interpreter

from cases import change_kernel_cases, expert_kernel_cases, model_kernel_cases

CASES: dict[str, Callable[[str], None]] = {
    name.removeprefix("case_"): case
    for module in (change_kernel_cases, expert_kernel_cases, model_kernel_cases)
    for name, case in vars(module).items()
    if name.startswith("case_")
}


def patch_the_language_once_a_launch() -> None:
    """The interpreter looks through all of Triton's language at every call of a device function, too: a fifth of its
    time, in which it finds what the launch has replaced already.
    """
    patch = interpreter._patch_lang

    def unless_patched(fn: Callable) -> interpreter._LangPatchScope:
        seen = [one for one in fn.__globals__.values() if one is language or one is language.core]
        is_patched = not any(language.core.is_builtin(one.load) for one in seen)
        return interpreter._LangPatchScope() if is_patched else patch(fn)

    interpreter._patch_lang = unless_patched


def main() -> None:
    """Run every case on the CPU; one JSON object of name -> traceback, "" when it passed."""
    patch_the_language_once_a_launch()
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
