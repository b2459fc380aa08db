"""A function that an option names: `FILE.py:function`, or `package.module:function`.

Owns: finding and importing it, and the copy of its file that a run keeps. Does not own: what it is called with, or in
which process it runs. Whoever calls `import_function` runs code of the user's.
"""

import hashlib
import importlib
import importlib.util
import inspect
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.conf.errors import ConfigError
from slipstream.conf.whole_files import write_whole

logger = logging.getLogger(__name__)


def is_function_path(value: str) -> bool:
    """Whether an option's value names a function rather than something that ships."""
    return ":" in value


def absolute(value: str) -> str:
    """The same function, for processes that run in another folder."""
    place, _, name = value.rpartition(":")
    return f"{Path(place).absolute()}:{name}" if place.endswith(".py") else value


def import_function(option: str, value: str) -> Callable[..., Any]:
    """The function that `value` names; a ConfigError with the option and the cure if there is none."""
    place, _, name = value.rpartition(":")
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ConfigError(f"{option}={value}: there is no file {Path(place).absolute()}")
    try:
        _search(Path(place).absolute().parent if is_file else Path.cwd())
        module = _load_file(Path(place)) if is_file else importlib.import_module(place)
    except Exception as e:  # the user's own module runs here
        raise ConfigError(
            f"{option}={value}: importing {place!r} failed: {type(e).__name__}: {e}{_cure(option, value, e)}"
        ) from e
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{option}={value}: {place!r} has no function {name!r}; {_functions_of(module)}")
    return function


def _cure(option: str, value: str, error: Exception) -> str:
    """What to do where a module is not found, or its package is not known; empty of other errors."""
    place, _, name = value.rpartition(":")
    if isinstance(error, ModuleNotFoundError) and error.name in (place, place.partition(".")[0]):
        return (
            "; start the run in the folder that holds it, put that folder on PYTHONPATH, or name the file: "
            f"{option}=FOLDER/FILE.py:{name}"
        )
    if place.endswith(".py") and "relative import" in str(error):
        file = Path(place).absolute()
        return f"; name its package: {option}={file.parent.name}.{file.stem}:{name}, in {file.parent.parent}"
    return ""


def has_form(form: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    """Whether a function, or the __call__ of an object, is of a form: inspect.iscoroutinefunction, for example."""
    return form(function) or form(function.__call__)


def file_of(function: Callable[..., Any]) -> str:
    """The file that defines a function, or the __call__ of an object; "" if no file does."""
    written = inspect.unwrap(function)
    try:
        return inspect.getsourcefile(written if inspect.isroutine(written) else written.__call__) or ""
    except TypeError:  # a built-in
        return ""


def _functions_of(module: ModuleType) -> str:
    """The functions that are written in a module, for whoever has misspelt one."""
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return f"it has {', '.join(own)}" if own else "it has none"


def source_of(value: str) -> Path | None:
    """The file that `value` names, without importing it; None where no module has that name."""
    place = value.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).absolute()
    _search(Path.cwd())
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def keep_copy(option: str, file: Path, copy: Path | None) -> None:
    """Copy a file that an option names to where a run keeps it (None: nowhere), and log its hash. A copy of other
    content, from an earlier start of the run, gets a name with a number, and the log says so."""
    try:
        content = file.read_bytes()
    except OSError as error:  # whoever needed it could read it, so only the copy is missing
        logger.warning("%s: %s was not copied into the run folder: %s", option, file, error)
        return
    kept = "" if copy is None else f"; a copy is kept in the run folder, {copy.name}"
    logger.info("%s: %s, sha256 %s%s", option, file, hashlib.sha256(content).hexdigest(), kept)
    if copy is None:
        return
    if copy.is_file() and copy.read_bytes() != content:
        names = (copy.with_name(f"{copy.stem}.{number}{copy.suffix}") for number in itertools.count(1))
        before = next(name for name in names if not name.exists())
        copy.rename(before)
        logger.warning("resumed with another file than before: %s (%s); the former is kept in %s", file, option, before)
    write_whole(copy, content)


def _search(folder: Path) -> None:
    """Let modules of the folder be imported. They hide no installed one."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_file(file: Path) -> ModuleType:
    """Import the file as a module, which hides no installed one."""
    spec = importlib.util.spec_from_file_location(file.stem, file.absolute())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module
