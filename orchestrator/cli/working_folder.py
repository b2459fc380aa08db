"""Commands that go on from a run's options stand where the run was started: relative paths of them begin there.

Owns: going there, and the words of the command line, whose paths are from where the user stands. Does not own: where
that is written down (files/run_folder.py).
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.cli.exit import tell
from slipstream.orchestrator.files.run_folder import RunFolder, working_folder

_PATH = re.compile(
    r"(?P<option>\+*(?:model\.path|model\.tokenizer|data\.path|data\.eval_path|data\.eval_sets\.\w+"
    r"|trainer\.lora\.init_from|reward\.judge\.prompt_file|rollout\.agent|algorithm\.(?:loss|advantage)"
    r"|reward\.(?:parts\.\w+\.)?kind))=(?P<path>[\w./ -]+)(?P<function>:\w+)?"
)
"""A word that may name a file or a folder of the user's."""
_NO_PATHS = ("null", "characters")


def stand_where_it_began(run: RunFolder, overrides: Sequence[str]) -> list[str]:
    """Change to the run's working folder, and say so. Returns the words; files that they name are the same."""
    began, here = working_folder(run), Path.cwd()
    if began is None or began == here:
        return list(overrides)
    if not began.is_dir():
        tell(f"warning: {began}, where the run was started, is not there: relative paths of its options start here")
        return list(overrides)
    words = [_anchored(word, here, began) for word in overrides]
    os.chdir(began)
    tell(f"relative paths of the run's options start at {began}, where it was started")
    return words


def _anchored(word: str, here: Path, began: Path) -> str:
    found = _PATH.fullmatch(word)
    if found is None or not (here / found["path"]).exists():
        if found is not None and _must_be_there(found) and not (began / found["path"]).exists():
            raise ConfigError(
                f"{word}: there is no {began / found['path']}, where the run was started, and no {here / found['path']}"
            )
        return word
    return f"{found['option']}='{here / found['path']}{found['function'] or ''}'"


def _must_be_there(found: re.Match[str]) -> bool:
    """Whether it names a file or a folder, and neither something that ships nor what is downloaded first."""
    from slipstream.orchestrator.inputs.model_files import download_first  # imports NumPy

    option, path = found["option"].lstrip("+"), found["path"]
    if Path(path).is_absolute() or path in _NO_PATHS:
        return False
    if option.endswith(("kind", "agent", "loss", "advantage")):
        return found["function"] is not None and path.endswith(".py")
    return not (option.startswith(("model.", "trainer.")) and download_first(Path(path)))
