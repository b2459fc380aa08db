"""A CPU without AMX, as PERSONALITY=zen has it: each Python process that imports torch finds none.

Libraries take their kernels by environment variables, but torch and vLLM ask the CPU itself for AMX, and some kernels
that need it do not run beside torch's AVX2 kernels.
"""

from types import ModuleType

from tests.fakes.on_import import patch_on_import


def deny_amx(module: ModuleType) -> None:
    """For torch.cpu."""
    module._is_amx_tile_supported = lambda: False  # pyright: ignore[reportAttributeAccessIssue] - torch's name


patch_on_import("torch.cpu", deny_amx)
