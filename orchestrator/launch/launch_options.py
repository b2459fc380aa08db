"""Flags of `slipstream launch`, checked.

Owns: what a recipe is told beside the run's options, and the rules about it. Does not own: how many machines the run
needs (command.py), how a recipe is written (templates/).
"""

import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from slipstream.conf.errors import ConfigError

DEFAULT_IMAGE = "slipstream:gpu"
DEFAULT_GPU = "H100"
"""What SkyPilot is asked for."""
MOUNT = PurePosixPath("/shared")


class Target(StrEnum):
    """Who starts the run."""

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
