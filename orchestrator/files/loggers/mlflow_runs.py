"""Rows of metrics in MLflow (https://mlflow.org).

Owns: what MLflow is told, through its client alone: numbers, the run's options, the run's name. Does not own: when
rows are sent (background.py). Invariant: credentials stay where MLflow reads them, in MLFLOW_TRACKING_USERNAME,
MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN; no file of the run has them.
"""

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.orchestrator.files.loggers.run_start import RunStart

MOST_PARAMETERS = 100
"""Options that MLflow takes in one request."""
MOST_CHARACTERS = 6000
"""Longest value of an option in MLflow."""
_NEXT_TO_RUNS = "mlruns"


class MlflowRun:
    def __init__(self, project: str, start: RunStart, runs: Path) -> None:
        # MLflow asks for this before it writes to a folder: that it adds no features to that any more is no reason
        # against it here.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # Rows wait here, and are tried again: MLflow's own patience of minutes would only hide that.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        self._entities: Any = importlib.import_module("mlflow.entities")
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._client: Any = tracking.MlflowClient(tracking_place(runs))
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        run = self._client.create_run(number, run_name=start.name, tags={"slipstream.run": start.group})
        self._id: str = run.info.run_id
        parameters = [self._entities.Param(name, str(value)[:MOST_CHARACTERS]) for name, value in start.options.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + MOST_PARAMETERS])

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(name, float(value), now_ms, step)
            for name, value in numbers.items()
            if name != "step"  # it has that one; and its folders cannot hold both `step` and `step/total_s`
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, timeout_s: float) -> None:
        self._client.set_terminated(self._id)


def tracking_place(runs: Path) -> str:
    """MLFLOW_TRACKING_URI, else a folder beside the run folders."""
    place = os.environ.get("MLFLOW_TRACKING_URI") or str(runs / _NEXT_TO_RUNS)
    return place if "://" in place or place.startswith(("file:", "databricks")) else Path(place).resolve().as_uri()
