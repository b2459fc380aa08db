"""Each Triton kernel beside its torch definition: one function a case, which asserts.

tests/unit/trainer/kernels/test_kernels.py runs them on the CPU under Triton's interpreter, in a process of its own
because the switch is read at import: `python -m cases.kernel_cases`. tests/gpu/test_kernels_cuda.py runs them natively.
"""

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter

from cases import change_kernel_cases, expert_kernel_cases, model_kernel_cases, publish_kernel_cases

CASES: dict[str, Callable[[str], None]] = {
    name.removeprefix("case_"): case
    for module in (change_kernel_cases, expert_kernel_cases, model_kernel_cases, publish_kernel_cases)
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


def work_out_each_type_once() -> None:
    """The interpreter checks the shape of a block and wraps its sizes for every value that it makes, and looks for
    numpy's type in a table that it makes each time: a third of its time. They follow from the name of the type.
    """
    core = language.core
    new_block, new_tensor, find_numpy = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[object, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            new_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            new_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle)

    def numpy_type(type: Any) -> Any:
        if type.name not in numpy_types:
            numpy_types[type.name] = find_numpy(type)
        return numpy_types[type.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, numpy_type


def leave_sums_of_integers_unchecked() -> None:
    """The interpreter does each sum and product of integers again in 64 bits: a quarter of its time. No case has
    numbers that are too large for a kernel's.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def main() -> None:
    """Run every case on the CPU; one JSON object of name -> traceback, "" when it passed."""
    patch_the_language_once_a_launch()
    work_out_each_type_once()
    leave_sums_of_integers_unchecked()
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
