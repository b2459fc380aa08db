"""`slipstream launch`: a run's options, and where it is to run --> a file for SLURM, KubeRay or SkyPilot.

Owns: the order of checks, how many machines a run needs, what the templates are filled with, and the words on how to
use the file. Does not own: the files (templates/). Invariants: nothing is started, and no model or data file is looked
at: the job's machines have them. A job that is started again under its name goes on where it was, without anybody's
help, and every word of a user reaches the run as it was typed.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Device, Objective, RunConfig
from slipstream.conf.words import word_of
from slipstream.orchestrator.launch.launch_options import DEFAULT_GPU, DEFAULT_IMAGE, LaunchOptions, Target, is_label

NODES_TIMEOUT_S = 600
"""Longest wait until all machines of a job have joined Ray."""
GRACE_S = 240
"""From the notice of an end to the end itself: a minute for the step, the rest for saving."""
_OURS = ("run.name", "run.dir", "run.resume", "cluster.ray_address")
_PATHS = ("model.path", "model.tokenizer", "data.path", "data.eval_path", "trainer.lora.init_from")


@dataclass(frozen=True, slots=True)
class Shape:
    """Machines of a run, all alike. Example: Shape(nodes=6, gpus=8)."""

    nodes: int
    gpus: int
    """GPUs of each machine; 0: a run on CPUs."""
    processes: int
    """Trainer ranks and rollout workers together."""


def launch(config: RunConfig, words: Sequence[str], options: LaunchOptions) -> tuple[str, str]:
    """Render the recipe. Returns the file, and what to say of it.

    Args:
        words: the overrides that they come from.

    Raises:
        ConfigError: the run and the flags do not fit.
    """
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
