"""What every logger does, and which one of them a run's options ask for.

    Telemetry --the finite numbers of a row--> TensorBoardEvents   files of the run folder: written at once
                                          |--> RayGauges           memory of this process: set at once
                                          +--> InBackground(...)   W&B, MLflow: sent by a thread of their own

Owns: the interface, and how loggers are chosen. Does not own: what is in a row (step_rows), or any logger's format.
Invariant: loggers get the same numbers, those of metrics.jsonl.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Protocol

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.files.loggers.background import InBackground
from slipstream.orchestrator.files.loggers.mlflow_runs import MlflowRun
from slipstream.orchestrator.files.loggers.ray_gauges import RayGauges
from slipstream.orchestrator.files.loggers.run_start import RunStart
from slipstream.orchestrator.files.loggers.tensorboard_events import TensorBoardEvents
from slipstream.orchestrator.files.loggers.wandb_runs import WandbRun
from slipstream.orchestrator.files.run_folder import RunFolder, flatten, to_plain


class Logger(Protocol):
    """A place to which rows go."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take one row: metric -> number, without those that the step does not have or that are not finite."""
        ...

    def close(self) -> None:
        """Bring what was written to its place. Called once."""
        ...


def open_loggers(
    config: RunConfig, folder: RunFolder, *, after_step: int, meanings: Mapping[str, str]
) -> tuple[Logger, ...]:
    """The loggers that run.loggers names, and Ray's gauges.

    Args:
        after_step: the step after which this start goes on; 0 for a new run.
        meanings: what each metric means, by name.
    """
    start = RunStart(
        name=folder.run_id if after_step == 0 else f"{folder.run_id}-from-{after_step}",
        group=folder.run_id,
        options=dict(flatten(to_plain(asdict(config)))),
    )
    known: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoardEvents(folder.tensorboard, after_step=after_step),
        "wandb": lambda: InBackground("W&B", lambda: WandbRun(config.run.project, start, folder.root)),
        "mlflow": lambda: InBackground("MLflow", lambda: MlflowRun(config.run.project, start, folder.root.parent)),
    }
    return (*(known[name]() for name in config.run.loggers), RayGauges(meanings))
