"""`slipstream launch`: a run's options, and where it is to run --> a file for SLURM, KubeRay or SkyPilot.

Owns: what a recipe is told beside the run's options, how many machines a run needs, what the templates are filled with,
and the words on how to use the file. Does not own: the files (templates/). Invariants: nothing is started, and no model
or data file is looked at: the job's machines have them. A job that is started again under its name goes on where it
was, without anybody's help, and every word of a user reaches the run as it was typed.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

import jinja2

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Device, Objective, RunConfig
from slipstream.conf.words import word_of

DEFAULT_IMAGE = "slipstream:gpu"
DEFAULT_GPU = "H100"
"""What SkyPilot is asked for."""
MOUNT = PurePosixPath("/shared")
NODES_TIMEOUT_S = 600
"""Longest wait until all machines of a job have joined Ray."""
GRACE_S = 240
"""From the notice of an end to the end itself: a minute for the step, the rest for saving."""
_OURS = ("run.name", "run.dir", "run.resume", "cluster.ray_address")
_PATHS = ("model.path", "model.tokenizer", "data.path", "data.eval_path", "trainer.lora.init_from")


class Target(StrEnum):
    slurm = "slurm"
    kuberay = "kuberay"
    skypilot = "skypilot"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What is not an option of the run. Example: LaunchOptions(target=Target.slurm, gpus_per_node=4)."""

    target: Target
    name: str | None = None
    """The job's name; None: run.name."""
    gpus_per_node: int = 8
    gpu_type: str | None = None
    cpus_per_gpu: int = 8
    memory_gib_per_gpu: int = 100
    time_limit: str | None = None
    """SLURM: D-HH:MM:SS or HH:MM:SS."""
    venv: Path = Path(sys.prefix)
    """SLURM: the environment whose `slipstream` runs, on every machine."""
    image: str | None = None
    """KubeRay, SkyPilot: the container's image."""
    volume: str | None = None
    """KubeRay, SkyPilot: a volume that all machines mount."""
    mount: PurePosixPath = MOUNT
    """Where they mount it."""
    namespace: str | None = None
    """KubeRay."""

    def __post_init__(self) -> None:
        if self.time_limit is not None and not re.fullmatch(r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", self.time_limit):
            raise ConfigError(f"--time-limit must be HH:MM:SS or D-HH:MM:SS, got {self.time_limit!r}")
        if not self.mount.is_absolute() or self.mount == PurePosixPath("/"):
            raise ConfigError(f"--mount must be an absolute path below /, got {self.mount}")
        for flag, value in (("--gpu-type", self.gpu_type), ("--image", self.image), ("--volume", self.volume)):
            if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", value):
                raise ConfigError(f"{flag} must be a name, got {value!r}")
        if self.namespace is not None and not is_label(self.namespace):
            raise ConfigError(f"--namespace must be a name of Kubernetes (a-z, 0-9, -), got {self.namespace!r}")
        self._refuse_what_the_target_ignores()

    def _refuse_what_the_target_ignores(self) -> None:
        given = {
            "--time-limit": (self.time_limit, (Target.slurm,)),
            "--venv": (self.venv if self.venv != Path(sys.prefix) else None, (Target.slurm,)),
            "--image": (self.image, (Target.kuberay, Target.skypilot)),
            "--volume": (self.volume, (Target.kuberay, Target.skypilot)),
            "--namespace": (self.namespace, (Target.kuberay,)),
        }
        for flag, (value, targets) in given.items():
            if value is not None and self.target not in targets:
                raise ConfigError(f"{flag} has no effect with {self.target}; it is for {' and '.join(targets)}")


def is_label(name: str) -> bool:
    """Whether Kubernetes takes it as the name of an object whose pods have 40 characters more."""
    return len(name) <= 40 and re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) is not None


@dataclass(frozen=True, slots=True)
class Shape:
    """Machines of a run, all alike. Example: Shape(nodes=6, gpus=8)."""

    nodes: int
    gpus: int
    """GPUs of each machine; 0: a run on CPUs."""
    processes: int


def launch(config: RunConfig, words: Sequence[str], options: LaunchOptions) -> tuple[str, str]:
    """Render the recipe of a run, to which `words` lead. Returns the file, and what to say of it."""
    _check_words(words, options)
    is_slurm = options.target is Target.slurm
    name, shape = _name(config, options), shape_of(config, options.gpus_per_node)
    if not is_slurm and options.volume is None and (shape.nodes > 1 or config.cluster.device is not Device.cpu):
        raise ConfigError(
            f"{options.target} needs --volume: a volume that every machine mounts at {options.mount}, with the "
            "model, the data and the run folders"
        )
    # cluster.device is decided here: the machine on which a job starts may see no GPU of its own.
    is_said = any(word.lstrip("+").startswith("cluster.device=") for word in words)
    decided = [] if is_said or config.cluster.device is not Device.auto else ["cluster.device=cuda"]
    own = [word for word in [*words, *decided] if word.partition("=")[0].lstrip("+") not in _OURS]
    # On a volume run folders are below its mount, unless run.dir is an absolute path.
    run_dir = config.run.dir if is_slurm else str(options.mount / config.run.dir)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    text = environment.get_template(f"{options.target}.jinja").render(
        options=options,
        job_name=name,
        name=f'{shlex.quote(name)}-"$SLURM_JOB_ID"' if is_slurm else shlex.quote(name),
        words=" \\\n    ".join([shlex.join(own), shlex.quote(word_of("run.dir", run_dir))]) if own else "",
        attached=" cluster.ray_address=auto" if shape.nodes > 1 or options.target is Target.kuberay else "",
        run_dir=shlex.quote(run_dir),
        programs=shlex.quote(str(options.venv / "bin")),
        nodes=shape.nodes,
        gpus=shape.gpus,
        cpus=options.cpus_per_gpu * shape.gpus or shape.processes,
        memory_gib=options.memory_gib_per_gpu * max(shape.gpus, 1),
        image=options.image or DEFAULT_IMAGE,
        default_gpu=DEFAULT_GPU,
        nodes_timeout_s=NODES_TIMEOUT_S,
        grace_s=GRACE_S,
    )
    return text, _what_to_do(name, shape, run_dir, options.target)


def _check_words(words: Sequence[str], options: LaunchOptions) -> None:
    """Refuse overrides that a recipe sets itself, and relative paths where the job is not run in the user's folder."""
    for word in words:
        name, _, quoted = word.lstrip("+").partition("=")
        if name in ("run.resume", "cluster.ray_address"):
            raise ConfigError(f"{name} has no effect with slipstream launch, which sets it in the job; remove it")
        value = quoted.strip("\"'")
        is_relative = value not in ("null", "characters") and "://" not in value and not value.startswith("/")
        if name in _PATHS and is_relative and options.target is not Target.slurm:
            raise ConfigError(f"{word} is relative, but the job runs in a container: give the path below --mount")


def _name(config: RunConfig, options: LaunchOptions) -> str:
    """The job's name; where nobody chose one, run.name as Kubernetes likes it."""
    if options.name is not None:
        if not is_label(options.name):
            raise ConfigError(f"--name must be at most 40 of a-z, 0-9 and -, got {options.name!r}")
        return options.name
    return re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:40].strip("-") or "run"


def _what_to_do(name: str, shape: Shape, run_dir: str, target: Target) -> str:
    several = shape.nodes > 1
    size = f"{shape.nodes} machine{'s' * several} of {shape.gpus or 'no'} GPUs"
    again = f"Started again under the name {name}, it goes on from its newest checkpoint."
    token = ' --secret RAY_AUTH_TOKEN="$(openssl rand -hex 24)"' if several else ""
    how = {
        Target.slurm: "Submit it with: sbatch FILE (partition and account are yours: sbatch -p PARTITION -A ACCOUNT). "
        "At its time limit, or preempted, it saves, goes back into the queue and then goes on.",
        Target.kuberay: f"Start it with: kubectl apply -f FILE (KubeRay 1.5 or newer). {again}",
        Target.skypilot: f"Start it with: sky jobs launch FILE{token}. {again}",
    }[target]
    return f"{size}. {how} Run folders: {shlex.quote(run_dir)}"


def shape_of(config: RunConfig, gpus_per_node: int) -> Shape:
    """The fewest machines with `gpus_per_node` GPUs each that hold the run; of one machine only what the run uses.

    An engine stays on one machine, and a trainer rank takes one GPU anywhere: with t GPUs per engine, a machine of g
    GPUs holds floor(g / t) engines, or workers_per_gpu times as many, and ranks take what engines leave. So the
    machines must have places for all engines, and GPUs for everything.

    Raises:
        ConfigError: an engine does not fit a machine, or CPUs would have to be shared by machines.
    """
    cluster, rollout = config.cluster, config.rollout
    num_workers = rollout.least_workers if config.algorithm.objective is Objective.policy else 0
    processes = config.trainer.num_ranks + num_workers
    if cluster.device is Device.cpu:
        return Shape(1, 0, processes)
    if cluster.share_gpu:
        return Shape(1, 1, processes)
    if num_workers and rollout.tp_size > gpus_per_node:
        raise ConfigError(
            f"rollout.tp_size={rollout.tp_size} does not fit a machine of {gpus_per_node} GPUs, and an engine runs on "
            "one machine; lower rollout.tp_size, or give --gpus-per-node"
        )
    num_engine_gpus = rollout.num_gpus if num_workers else 0
    num_gpus = config.trainer.num_ranks + num_engine_gpus
    if num_gpus <= gpus_per_node:
        return Shape(1, num_gpus, processes)
    num_places = num_engine_gpus // rollout.tp_size
    nodes_for_engines = -(-num_places // (gpus_per_node // rollout.tp_size))
    return Shape(max(nodes_for_engines, -(-num_gpus // gpus_per_node)), gpus_per_node, processes)
