"""Change one module of a child process as soon as it is loaded, wherever in the process tree that is.

A `sitecustomize.py` calls `patch_on_import`. Python runs that file at the start of every process whose PYTHONPATH
begins with its folder (and has the repository's root further on).
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Patching(Loader):
    """Loads a module as another loader does, and patches it."""

    def __init__(self, found: Loader, patch: Callable[[ModuleType], None]) -> None:
        self._found, self._patch = found, patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._found.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._found.exec_module(module)
        self._patch(module)


class _Finder(MetaPathFinder):
    """Finds one module with that loader."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader, self._patch)
        return spec


def patch_on_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch(module)` right after module `name` was loaded in this process."""
    sys.meta_path.insert(0, _Finder(name, patch))
