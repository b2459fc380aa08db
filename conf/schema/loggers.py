"""Sections `run.wandb` and `run.mlflow`: where else rows of metrics go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from slipstream.conf.schema.rules import require

LOGGERS = ("tensorboard", "wandb", "mlflow")
"""What run.loggers may name; each is a package of the same name."""


class WandbMode(StrEnum):
    """`offline`: into the run folder, for `wandb sync` later."""

    online = "online"
    offline = "offline"


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases. Its key is never an option: `wandb login`, or WANDB_API_KEY."""

    project: str = "slipstream"
    """Project of W&B in which runs appear: PROJECT, or TEAM/PROJECT of a team or another user."""
    mode: WandbMode | None = None
    """online: send rows at once; offline: keep them in <run>/wandb for `wandb sync`. null: as WANDB_MODE says, or
    without it online.
    """

    def __post_init__(self) -> None:
        require(
            all(self.project.split("/")) and self.project.count("/") < 2,
            f"run.wandb.project must be PROJECT or TEAM/PROJECT, got {self.project!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig:
    """MLflow. Its credentials are never options: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or
    MLFLOW_TRACKING_TOKEN.
    """

    tracking_uri: str | None = None
    """Address of MLflow's server, or a folder. null: MLFLOW_TRACKING_URI, or without it the folder <run.dir>/mlruns."""
    experiment: str = "slipstream"
    """Experiment of MLflow in which runs appear."""

    def __post_init__(self) -> None:
        require(bool(self.experiment), "run.mlflow.experiment must be a name, got nothing")
        require(self.tracking_uri != "", "run.mlflow.tracking_uri must be an address, a folder or null, got nothing")
        if self.tracking_uri is None:
            return
        address = urlsplit(self.tracking_uri)
        require(
            address.username is None and address.password is None,
            f"run.mlflow.tracking_uri of {address.hostname} holds credentials, which the run folder would keep; "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead",
        )
