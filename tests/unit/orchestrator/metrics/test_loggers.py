"""Locks: TensorBoard, W&B and MLflow, each read back with its own code, hold the numbers of metrics.jsonl; credentials
stay out of the run folder; a service that fails costs the run nothing and gets its rows later.
"""

import importlib
import logging
import threading
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import ProgressLine
from slipstream.orchestrator.inputs.environment_checks import check_loggers
from slipstream.orchestrator.metrics import loggers
from slipstream.orchestrator.metrics.catalogue import METRICS
from slipstream.orchestrator.metrics.loggers import InBackground, RunStart, WandbRun, open_loggers
from slipstream.orchestrator.metrics.step_rows import StepRecord
from slipstream.orchestrator.metrics.telemetry import Telemetry
from slipstream.trainer.types import OptimStats

SECRETS = {"WANDB_API_KEY": "5ecre7" * 7, "MLFLOW_TRACKING_PASSWORD": "pa55w0rd-of-a-user"}
ALL = ["experiment=quickstart", "run.loggers=[tensorboard,wandb,mlflow]", "run.project=us/slipstream"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows of a run with every logger, and one more of the same run, resumed after step 1. WANDB_MODE=offline."""
    runs = tmp_path_factory.mktemp("runs")
    folder = RunFolder(runs / "mine")
    folder.root.mkdir()
    config = load_run_config(ALL)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for first_step, steps in ((0, range(3)), (1, range(2, 3))):
            opened = open_loggers(config, folder, after_step=first_step, meanings=METRICS)
            progress = ProgressLine(Console(file=StringIO()))
            with Telemetry(folder, num_steps=3, first_step=first_step, progress=progress, loggers=opened) as telemetry:
                for step in steps:
                    norm = float("nan") if step == 1 else 0.5 + step + first_step
                    optim = OptimStats(step, norm, 1e-3, step != 1)
                    telemetry.step(StepRecord(step, step, optim=optim, extra={"step/total_s": 2.0}))
    return runs


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if value is not None}


def test_tensorboard_holds_the_rows(runs: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(runs / "mine" / "tensorboard")).Reload()
    rows = read_rows(runs / "mine" / "metrics.jsonl")
    seen = {name: {event.step: event.value for event in curves.Scalars(name)} for name in curves.Tags()["scalars"]}
    for name in set().union(*rows):
        expected = {row["step"]: row[name] for row in rows if row[name] is not None}
        assert seen.get(name, {}) == pytest.approx(expected), name


def test_mlflow_holds_the_rows(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((runs / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("us/slipstream")
    assert experiment is not None
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(found) == {"mine", "mine-from-1"}
    for run in found.values():
        assert (run.info.status, run.data.tags["slipstream.run"]) == ("FINISHED", "mine")
        assert run.data.params["trainer.num_ranks"] == "2"
    rows = read_rows(runs / "mine" / "metrics.jsonl")
    for name, steps in (("mine", (0, 1)), ("mine-from-1", (2,))):
        for step in steps:
            (row,) = (row for row in rows if row["step"] == step)
            for metric, value in numbers_of(row).items() - {("step", step)}:
                history = {m.step: m.value for m in client.get_metric_history(found[name].info.run_id, metric)}
                assert history[step] == value, (name, metric)
    assert not client.get_metric_history(found["mine"].info.run_id, "reward/mean"), "None is no number"
    norms = client.get_metric_history(found["mine"].info.run_id, "optim/grad_norm")
    assert [(norm.step, norm.value) for norm in norms] == [(0, 0.5), (2, 2.5)], "a norm of NaN is left out"


def test_wandb_holds_the_rows(runs: Path) -> None:
    rows = {row["step"]: row for row in read_rows(runs / "mine" / "metrics.jsonl")}
    found = {}
    for path in (runs / "mine" / "wandb").glob("offline-run-*/run-*.wandb"):
        records = list(wandb_records(path))
        (run,) = (record.run for record in records if record.HasField("run"))
        assert run.run_group == "mine"
        assert (run.entity, run.project) == ("us", "slipstream")
        history = [
            {item.key or ".".join(item.nested_key): float(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        found[run.display_name] = {int(row["_step"]): row for row in history}
    assert {name: set(steps) for name, steps in found.items()} == {"mine": {0, 1, 2}, "mine-from-1": {2}}
    for name, step in (("mine", 0), ("mine", 1), ("mine-from-1", 2)):
        logged = {key: value for key, value in found[name][step].items() if not key.startswith("_")}
        assert logged == pytest.approx(numbers_of(rows[step]))


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: after 7 bytes, LevelDB's log format, in blocks of 32 KiB."""
    Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # full, last
            yield Record.FromString(whole)
            whole = b""


def test_a_connection_is_given_up_before_the_end_of_a_run_gives_up_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run without network waits for all of CLOSE_TIMEOUT_S, and wandb complains after that."""
    asked: list[Any] = []
    monkeypatch.setattr("wandb.init", lambda **given: asked.append(given))
    start = RunStart(name="a", group="a", options={})
    WandbRun("sums", start, tmp_path)
    (given,) = asked
    assert given["settings"].init_timeout < loggers.CLOSE_TIMEOUT_S / 1.5
    assert (given["entity"], given["project"]) == (None, "sums")


def test_no_file_of_a_run_has_credentials(runs: Path) -> None:
    files = [path for path in runs.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        for secret in (SECRETS["WANDB_API_KEY"], SECRETS["MLFLOW_TRACKING_PASSWORD"]):
            assert secret.encode() not in path.read_bytes(), path


class Flaky:
    """A service that takes rows only while it is up."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        self.rows: list[int] = []
        self.has_refused = threading.Event()
        self.has_finished = False

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        if not self.is_up.is_set():
            self.has_refused.set()
            raise ConnectionError("nobody there")
        self.rows.append(step)

    def finish(self, timeout_s: float) -> None:
        self.has_finished = True


def test_rows_wait_for_a_service_that_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    service = Flaky()
    with caplog.at_level(logging.INFO):
        logger = InBackground("It", lambda: service, try_again_s=0.01)
        for step in range(3):
            logger.write(step, {})
        assert service.has_refused.wait(120)
        service.is_up.set()
        while not service.rows:
            pass
        logger.close()
    assert (service.rows, service.has_finished) == ([0, 1, 2], True)
    assert [message for message in caplog.messages if "It" in message] == [
        "It does not take rows (ConnectionError: nobody there); they are kept, and tried again every 0 s",
        "It takes rows again",
    ]


def test_a_service_that_stays_away_is_counted_and_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "MOST_ROWS", 2)
    service = Flaky()
    logger = InBackground("It", lambda: service)
    for step in range(2):
        logger.write(step, {})
    assert service.has_refused.wait(120)
    for step in range(5):
        logger.write(step, {})
    logger.close()
    assert "It did not get 7 rows; metrics.jsonl has them" in caplog.messages
    assert not service.has_finished


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.loggers=wandb"], r"must be a list of texts, got 'wandb'. A list of one is run.loggers=\[wandb\]"),
        (["trainer.optim.betas=0.9"], r"trainer.optim.betas must be a list of 2 numbers, got '0.9'$"),
        (["run.loggers=[tensorbord]"], "run.loggers must be a list of tensorboard, wandb, mlflow, got 'tensorbord'"),
        (["run.loggers=[wandb,wandb]"], r"run.loggers names one twice: \['wandb', 'wandb'\]"),
        (
            ["run.project=x"],
            r"run.project has no effect with run.loggers=\[tensorboard\]; .*name wandb or mlflow there",
        ),
        (["run.loggers=[wandb]", "run.project=a/b/c"], "for W&B PROJECT or TEAM/PROJECT; got 'a/b/c'"),
        (["run.loggers=[mlflow]", "run.project="], "run.project must be a name; .*got ''"),
        (["run.tensorboard=false"], "unknown option run.tensorboard"),
    ],
)
def test_mistakes_in_the_options(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(["experiment=quickstart", *words])


def test_what_is_checked_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE", "NETRC",
                 "MLFLOW_TRACKING_URI"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    online, mlflow = (
        load_run_config(["experiment=quickstart", f"run.loggers=[{name}]"]) for name in ("wandb", "mlflow")
    )
    with pytest.raises(ConfigError, match=r"has no key here: call `wandb login`.*WANDB_MODE=offline"):
        check_loggers(online)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert check_loggers(online).finding == "metrics.jsonl, wandb (online)"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(ConfigError, match="has no key here"):
        check_loggers(online)
    for mode in ("offline", "disabled", "dryrun"):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert check_loggers(online).finding == f"metrics.jsonl, wandb ({mode})", "no key is asked for"
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ConfigError, match=r"WANDB_MODE=ofline is no mode of W&B \(online, offline.*unset it"):
        check_loggers(online)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://host/db")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sqlalchemy" else object())
    with pytest.raises(ConfigError, match="reaches no postgresql database"):
        check_loggers(mlflow)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mlflow, which is not installed: pip install 'slipstream-rl\[mlflow\]'"):
        check_loggers(mlflow)
