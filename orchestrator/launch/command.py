"""`slipstream launch`: a run's options, and where it is to run --> a file for SLURM, KubeRay or SkyPilot.

Owns: the order of checks, and the words on how to use the file. Does not own: the files (slurm.py, kuberay.py,
skypilot.py). Invariant: nothing is started, and no model or data file is looked at: the job's machines have them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from conf.errors import ConfigError
from conf.schema import Device, RunConfig
from orchestrator.launch import kuberay, skypilot, slurm
from orchestrator.launch.launch_options import LaunchOptions, Target, is_label
from orchestrator.launch.script import Job, check_paths, check_words
from orchestrator.launch.shape import shape_of

_RENDER: Mapping[Target, Callable[[Job, LaunchOptions], str]] = {
    Target.slurm: slurm.render,
    Target.kuberay: kuberay.render,
    Target.skypilot: skypilot.render,
}


def launch(config: RunConfig, words: Sequence[str], options: LaunchOptions) -> tuple[str, str]:
    """Render the recipe.

    Args:
        config: the run's options.
        words: the overrides that they come from.
        options: the flags.

    Returns:
        The file, and what to say of it.

    Raises:
        ConfigError: the run and the flags do not fit.
    """
    check_words(words)
    job = Job(
        _name(config, options),
        _with_device(words, config),
        _run_dir(config, options),
        shape_of(config, options.gpus_per_node),
    )
    if options.target is not Target.slurm:
        check_paths(words)
        if options.volume is None and (job.has_several_nodes or config.cluster.device is not Device.cpu):
            raise ConfigError(
                f"{options.target} needs --volume: a volume that every machine mounts at {options.mount}, with the "
                "model, the data and the run folders"
            )
    return _RENDER[options.target](job, options), _what_to_do(job, options)


def _name(config: RunConfig, options: LaunchOptions) -> str:
    """The job's name; where nobody chose one, run.name as Kubernetes likes it."""
    if options.name is not None:
        if not is_label(options.name):
            raise ConfigError(f"--name must be at most 40 of a-z, 0-9 and -, got {options.name!r}")
        return options.name
    return re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:40].strip("-") or "run"


def _with_device(words: Sequence[str], config: RunConfig) -> list[str]:
    """cluster.device is decided here: the machine on which a job starts may see no GPU of its own."""
    is_said = any(word.lstrip("+").startswith("cluster.device=") for word in words)
    return [*words] if is_said or config.cluster.device is not Device.auto else [*words, "cluster.device=cuda"]


def _run_dir(config: RunConfig, options: LaunchOptions) -> str:
    """run.dir; on a volume, unless it is an absolute path, below its mount."""
    if options.target is Target.slurm or config.run.dir.startswith("/"):
        return config.run.dir
    return str(options.mount / config.run.dir)


def _what_to_do(job: Job, options: LaunchOptions) -> str:
    size = f"{job.shape.nodes} machine{'s' * job.has_several_nodes} of {job.shape.gpus or 'no'} GPUs"
    again = f"Started again under the name {job.name}, it goes on from its newest checkpoint."
    token = ' --secret RAY_AUTH_TOKEN="$(openssl rand -hex 24)"' if job.has_several_nodes else ""
    how = {
        Target.slurm: "Submit it with: sbatch FILE (partition and account are yours: sbatch -p PARTITION -A ACCOUNT). "
        "At its time limit, or preempted, it saves, goes back into the queue and then goes on.",
        Target.kuberay: f"Start it with: kubectl apply -f FILE (KubeRay 1.5 or newer). {again}",
        Target.skypilot: f"Start it with: sky jobs launch FILE{token}. {again}",
    }[options.target]
    return f"{size}. {how} Run folders: {shlex.quote(job.run_dir)}"
