"""The copies that a run's folder keeps of the files behind its functions and prompts of judges.

    start of a run --> reward_source.py, agent_source.py ...  <--compared-- a resume, and its --dry-run

Owns: their names for a loss, an advantage and an agent; whether a run that goes on has the same files. Does not own:
which file defines a function, nor the copying (conf/functions.py); the copies of rewards (rollout/rewards/runner.py).
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.functions import is_function_path, keep_copy, source_of
from slipstream.conf.schema import Objective, RunConfig
from slipstream.orchestrator.files.run_folder import RunFolder, resumed_folder

logger = logging.getLogger(__name__)

AGENT_COPY = "agent_source.py"


def own_algorithm(config: RunConfig) -> dict[str, str]:
    """A loss and an advantage of the user's own: option -> function."""
    algorithm = config.algorithm
    both = {"algorithm.loss": algorithm.loss, "algorithm.advantage": algorithm.advantage}
    is_read = algorithm.objective is Objective.policy
    return {option: value for option, value in both.items() if is_read and is_function_path(value)}


def _copy_of(option: str) -> str:
    return f"{option.rpartition('.')[2]}_source.py"


def keep_sources(folder: RunFolder, config: RunConfig) -> None:
    """Copy the files of a loss and an advantage of the user's own into the run folder, and log their hashes."""
    for option, value in own_algorithm(config).items():
        source = source_of(value)
        if source is None:
            logger.warning("%s=%s: its file was not copied into the run folder", option, value)
            continue
        keep_copy(f"{option}={value}", source, folder.root / _copy_of(option))


def edited_algorithm(config: RunConfig) -> str:
    """As edited(), of a loss and an advantage of the user's own."""
    files = {_copy_of(option): source_of(value) for option, value in own_algorithm(config).items()}
    return edited(config, {copy: file for copy, file in files.items() if file is not None})


def edited(config: RunConfig, files: Mapping[str, Path]) -> str:
    """Which of these files a run that goes on had with other content, in words that follow others; empty if none.
    `files`: The name of the copy in the run folder -> the file that is used now."""
    root = resumed_folder(config.run)
    kept = {} if root is None else {file: root / copy for copy, file in files.items() if (root / copy).is_file()}
    others = [file for file, copy in kept.items() if file.is_file() and file.read_bytes() != copy.read_bytes()]
    return "".join(f"; {file} is another file than the run had before ({kept[file].name})" for file in others)


def check_code_is_there(folder: RunFolder, config: RunConfig) -> None:
    """A run that goes on needs the files of its code. Raises ConfigError: some have gone; it names the copies that the
    run keeps."""
    reward = config.reward
    given = {_copy_of(option): (option, value) for option, value in own_algorithm(config).items()}
    given[AGENT_COPY] = ("rollout.agent", config.rollout.agent or "")
    for name, part in reward.by_name.items():
        given[reward.source_copy(name)] = (f"{reward.section_of(name)}.kind", part.kind)
    gone: list[str] = []
    for copy, (option, value) in given.items():
        file, _, function = value.rpartition(":")
        if file.endswith(".py") and not Path(file).is_file() and (folder.root / copy).is_file():
            cure = f"give its new place, or the copy that the run keeps: {option}={folder.root / copy}:{function}"
            gone.append(f"{option}={value}: there is no file {Path(file).absolute()}; {cure}")
    if gone:
        raise ConfigError("; ".join(gone))
