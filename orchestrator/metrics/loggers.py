"""Where the rows of metrics go beside metrics.jsonl, and which of these places a run's options ask for.

    Telemetry --the finite numbers of a row--> TensorBoardEvents   files of the run folder: written at once
                                          |--> RayGauges           memory of this process, for Prometheus: set at once
                                          +--> InBackground(...)   W&B (https://docs.wandb.ai), MLflow
                                                                   (https://mlflow.org): sent by a thread of their own

Owns: the interface, what each place is told, what a failure of a service means, how long the run's end waits for it.
Does not own: what is in a row (step_rows.py).
Invariants: all get the same numbers, those of metrics.jsonl. A service that is slow, absent or fails costs the run
nothing: its rows arrive in order, each once; that it fails is told in the log, once, and so is that it works again.
Credentials stay where W&B (WANDB_API_KEY, ~/.netrc) and MLflow (MLFLOW_TRACKING_...) read them; no file of the run has
them.
"""

import importlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream.conf.failures import outcome_of
from slipstream.conf.json_files import JsonMapping, JsonObject
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.files.run_folder import RunFolder, flatten, to_plain

logger = logging.getLogger(__name__)

TRY_AGAIN_S = 30.0
"""Pause after a failure of a service. Rows are kept meanwhile."""
CLOSE_TIMEOUT_S = 20.0
"""Longest that the end of a run waits for rows to arrive."""
CONNECT_TIMEOUT_S = 10.0
"""Longest that a connection to W&B may take before rows are kept and it is tried again; a run may wait as long to end.
"""
MOST_ROWS = 10_000
"""Rows that are kept for a service that does not take them; the newest beyond them are left out."""
MOST_PARAMETERS = 100
"""Options that MLflow takes in one request."""
MOST_CHARACTERS = 6000
"""Longest value of an option in MLflow."""

Row = tuple[int, Mapping[str, float]]


class Logger(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take one row: metric -> number, without those that the step does not have or that are not finite."""
        ...

    def close(self) -> None:
        """Bring what was written to its place. Called once."""
        ...


def open_loggers(
    config: RunConfig, folder: RunFolder, *, after_step: int, meanings: Mapping[str, str]
) -> tuple[Logger, ...]:
    """The loggers that run.loggers names, and Ray's gauges. `after_step`: the step after which this start goes on; 0
    for a new run. `meanings`: what each metric means, by name."""
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


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start of a run, as W&B and MLflow show it: they never take a row back, so each start is a run of theirs, and
    rows of steps that a resumed run does again do not mix with the earlier ones."""

    name: str
    """The run's name, and from which step on: run-20260131-120000-from-50."""
    group: str
    """The run's name: what all its starts have in common."""
    options: JsonMapping
    """Every option of the run by its full name."""


class Service(Protocol):
    """A connection to a service. Its methods may block and raise."""

    def send(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def finish(self, timeout_s: float) -> None: ...


class InBackground:
    """See the module's docstring. `name`: of the service, for people. `connect`: makes the connection. Called in the
    thread, again after a failure."""

    def __init__(self, name: str, connect: Callable[[], Service], *, try_again_s: float = TRY_AGAIN_S) -> None:
        self._name = name
        self._connect = connect
        self._try_again_s = try_again_s
        self._rows: queue.Queue[Row | None] = queue.Queue(MOST_ROWS)
        self._num_left_out = 0
        self._closing = threading.Event()
        self._deadline_s = float("inf")
        self._num_unsent = 0
        self._thread = threading.Thread(target=self._send_all, name=f"logger of {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        try:
            self._rows.put_nowait((step, numbers))
        except queue.Full:
            self._num_left_out += 1

    def close(self) -> None:
        """Wait until the rows have arrived, for CLOSE_TIMEOUT_S at most. What has not is counted in the log."""
        self._deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._closing.set()
        while True:
            try:
                self._rows.put_nowait(None)
                break
            except queue.Full:  # of rows that nobody takes
                self._rows.get_nowait()
                self._num_left_out += 1
        self._thread.join(CLOSE_TIMEOUT_S + 1)
        num_lost = self._num_left_out + self._num_unsent
        if self._thread.is_alive():
            logger.warning("%s does not end within %.0f s and is left; metrics.jsonl has all rows",
                           self._name, CLOSE_TIMEOUT_S)  # fmt: skip
        elif num_lost:
            logger.warning("%s did not get %d rows; metrics.jsonl has them", self._name, num_lost)

    def _send_all(self) -> None:
        """The thread: connect, then send row after row, each until it is taken."""
        service: Service | None = None
        row = self._rows.get()
        is_failing = False
        while row is not None:
            try:
                service = service or self._connect()
                service.send(*row)
            except Exception as error:  # noqa: BLE001 - the edge to a library that speaks to a service
                if not is_failing:
                    logger.warning("%s does not take rows (%s: %s); they are kept, and tried again every %.0f s",
                                   self._name, type(error).__name__, _first_line(error), self._try_again_s)  # fmt: skip
                is_failing = True
                if self._closing.wait(self._try_again_s):
                    self._num_unsent = 1 + sum(left is not None for left in self._rows.queue)
                    return
                continue
            if is_failing:
                logger.info("%s takes rows again", self._name)
            is_failing = False
            row = self._rows.get()
        if service is not None:
            failure = outcome_of(service.finish, max(1.0, self._deadline_s - time.monotonic()))
            if failure is not None:
                logger.warning("%s was not closed: %s: %s", self._name, type(failure).__name__, _first_line(failure))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


class WandbRun:
    """One run of W&B, in the mode of WANDB_MODE. Offline it is a folder, RUN/wandb/offline-run-*, for `wandb sync`."""

    def __init__(self, project: str, start: RunStart, folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        # It gets numbers and options: no console, no code, no git remote, no facts about the machine.
        settings = wandb.Settings(
            silent=True,
            init_timeout=CONNECT_TIMEOUT_S,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        team, _, project = project.rpartition("/")
        self._run: Any = wandb.init(
            project=project,
            entity=team or None,
            name=start.name,
            group=start.group,
            config=dict(start.options),
            dir=str(folder),
            reinit="create_new",
            settings=settings,
        )

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, timeout_s: float) -> None:
        self._run.settings.finish_timeout = timeout_s
        self._run.finish()


class MlflowRun:
    """One run of MLflow, in a folder beside the run folders where MLFLOW_TRACKING_URI names no other place."""

    def __init__(self, project: str, start: RunStart, runs: Path) -> None:
        # MLflow asks for this before it writes to a folder: that it adds no features to that any more is no reason
        # against it here.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # Rows wait here, and are tried again: MLflow's own patience of minutes would only hide that.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        self._entities: Any = importlib.import_module("mlflow.entities")
        tracking: Any = importlib.import_module("mlflow.tracking")
        place = os.environ.get("MLFLOW_TRACKING_URI") or str(runs / "mlruns")
        is_address = "://" in place or place.startswith(("file:", "databricks"))
        self._client: Any = tracking.MlflowClient(place if is_address else Path(place).resolve().as_uri())
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


class TensorBoardEvents:
    """A file of TensorBoard events, written through TensorBoard's record writer. (Its event writer uses a thread, in
    which nobody would catch the error of a full disk.) `after_step`: TensorBoard is told to forget events of later
    steps."""

    def __init__(self, folder: Path, *, after_step: int) -> None:
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._Event, self._Summary = events.Event, summaries.Summary
        is_resumed = folder.is_dir()
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = records.RecordWriter((folder / name).open("xb", buffering=0))
        self._add(file_version="brain.Event:2")
        if is_resumed:
            self._add(step=after_step + 1, session_log=events.SessionLog(status=events.SessionLog.START))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step=step, summary=self._Summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.write(self._Event(wall_time=time.time(), **fields).SerializeToString())


class RayGauges:
    """The newest row as Ray gauges. Does nothing when this process is not part of a Ray cluster."""

    def __init__(self, meanings: Mapping[str, str]) -> None:
        self._meanings = meanings
        self._gauges: JsonObject = {}

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        import ray
        from ray.util.metrics import Gauge

        if not ray.is_initialized():
            return
        for name, value in numbers.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge("slipstream_" + name.replace("/", "_"), description=self._meanings[name])
            self._gauges[name].set(float(value))

    def close(self) -> None:
        """Nothing to do: Ray forgets gauges with their process."""
