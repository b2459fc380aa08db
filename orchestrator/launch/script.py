"""What all recipes have in common: the commands that start the run, or go on with it.

    a Ray cluster over the machines (only where there are several)
    a checkpoint of this job's run is there?  yes: slipstream resume     no: slipstream train WORDS

Owns: these lines of shell. Does not own: how a machine of the job is told from the others, and signals (slurm.py,
kuberay.py, skypilot.py). Invariant: a job that is started again under its name goes on where it was, without anybody's
help, and every word of a user reaches the run as it was typed.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from conf.errors import ConfigError
from orchestrator.launch.shape import Shape

NODES_TIMEOUT_S = 600
"""Longest wait until all machines of a job have joined Ray."""
GRACE_S = 240
"""From the notice of an end to the end itself: a minute for the step, the rest for saving."""
_OURS = ("run.name", "run.dir", "run.resume", "cluster.ray_address")
_PATHS = ("model.path", "model.tokenizer", "data.path", "data.eval_path", "trainer.lora.init_from")


@dataclass(frozen=True, slots=True)
class Job:
    """A run to be launched: what every recipe is rendered from."""

    name: str
    """Of the job, and the first part of the run folder's name."""
    words: Sequence[str]
    """Overrides as the user typed them."""
    run_dir: str
    """Where run folders are, on every machine."""
    shape: Shape

    @property
    def has_several_nodes(self) -> bool:
        """Whether it needs a Ray cluster over machines."""
        return self.shape.nodes > 1


def check_words(words: Sequence[str]) -> None:
    """Refuse overrides that a recipe sets itself."""
    for word in words:
        name = word.partition("=")[0].lstrip("+")
        if name in _OURS[2:]:
            raise ConfigError(f"{name} has no effect with slipstream launch, which sets it in the job; remove it")


def check_paths(words: Sequence[str]) -> None:
    """Refuse relative paths, where the job does not run in the user's folder."""
    for word in words:
        name, _, quoted = word.partition("=")
        value = quoted.strip("\"'")
        is_path = value not in ("null", "characters") and "://" not in value and not value.startswith("/")
        if name.lstrip("+") in _PATHS and is_path:
            raise ConfigError(f"{word} is relative, but the job runs in a container: give the path below --mount")


def start_lines(job: Job, *, name: str, on_cluster: bool) -> list[str]:
    """Lines of bash that set "$@" to the words of the run: train, or resume where there is a checkpoint.

    Args:
        name: the run's name as shell text, in double quotes where it holds a variable.
        on_cluster: whether the run joins a Ray cluster.
    """
    own = [word for word in job.words if word.partition("=")[0].lstrip("+") not in _OURS]
    attached = " cluster.ray_address=auto" if on_cluster else ""
    words = " \\\n    ".join([shlex.join(own), f"run.dir={shlex.quote(job.run_dir)}"]) if own else ""
    return [
        f"name={name}",
        "set -- train \\",
        f'    {words} "run.name=$name"{attached}',
        "# Started again under this name: go on from the newest checkpoint.",
        f'for checkpoint in {shlex.quote(job.run_dir)}/"$name"-[0-9]*/checkpoints/step-*/manifest.json; do',
        f'  if [ -e "$checkpoint" ]; then set -- resume "${{checkpoint%/checkpoints/*}}"{attached}; fi',
        "done",
    ]


def wait_for_nodes(num_nodes: int) -> list[str]:
    """Lines of bash that wait until so many machines have joined the cluster of RAY_ADDRESS."""
    return [
        f"timeout {NODES_TIMEOUT_S} python - <<'END'",
        "import time",
        "import ray",
        'ray.init("auto", log_to_driver=False)',
        f'while sum(node["Alive"] for node in ray.nodes()) < {num_nodes}:',
        "    time.sleep(2)",
        "END",
    ]
