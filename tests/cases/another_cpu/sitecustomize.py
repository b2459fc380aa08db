"""A CPU without AMX, as PERSONALITY=zen has it: each Python process that imports torch finds none.

Libraries take their kernels by environment variables, but torch and vLLM ask the CPU itself for AMX, and some kernels
that need it do not run beside torch's AVX2 kernels. Python imports this module at its start from PYTHONPATH.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

WITHOUT_AMX = "torch.cpu"


class CpuLoader(Loader):
    """Runs torch.cpu, then takes its AMX away."""

    def __init__(self, found: Loader) -> None:
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._found.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._found.exec_module(module)
        module._is_amx_tile_supported = lambda: False  # pyright: ignore[reportAttributeAccessIssue] - torch's name


class CpuFinder(MetaPathFinder):
    """Finds torch.cpu with that loader."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == WITHOUT_AMX else None  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            spec.loader = CpuLoader(spec.loader)
        return spec


sys.meta_path.insert(0, CpuFinder())
