"""docs/metrics.md lists the catalogue of metrics word for word, and every event of fleet.jsonl; Grafana's dashboard and
Prometheus' alerts name metrics that exist, and are what their own tools take.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboard import UID, dashboard, gauge
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.orchestrator.environment import variables
from slipstream.orchestrator.metrics.catalogue import JUDGE_METRICS, METRICS, REWARD_METRICS
from slipstream.orchestrator.metrics.held_out import PASS_METRICS, SET_METRICS

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"


def rows_of(part: int) -> list[str]:
    """Rows of the tables before the first heading (0) and below it, fleet.jsonl (1)."""
    text = PAGE.read_text(encoding="utf-8").split("\n## ")[part]
    return [line for line in text.splitlines() if line.startswith("| `")]


def test_the_page_lists_every_metric() -> None:
    listed = rows_of(0)
    metrics = METRICS | REWARD_METRICS | JUDGE_METRICS | PASS_METRICS | SET_METRICS
    in_a_table = {name: meaning.replace("|", "\\|") for name, meaning in metrics.items()}
    assert listed == [f"| `{name}` | {meaning} |" for name, meaning in in_a_table.items()]


def test_the_page_lists_every_event_of_a_worker() -> None:
    assert [line.split("`")[1] for line in rows_of(1)] == [event.value for event in FleetEvent]


FOLDER = Path(__file__).resolve().parents[4] / "monitoring"
GAUGES = {gauge(metric) for metric in METRICS}


def test_the_dashboard_is_written_from_its_panels_and_names_metrics_that_exist() -> None:
    text = (FOLDER / "dashboard.json").read_text()
    assert json.loads(text) == dashboard(), "run: python monitoring/dashboard.py > monitoring/dashboard.json"
    assert set(re.findall(r"ray_slipstream_\w+", text)) <= GAUGES
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_grafanas_own_types_know_all_that_the_dashboard_says() -> None:
    """Read and written by Grafana's SDK, the dashboard keeps every field."""

    def kept(ours: object, theirs: object, path: str) -> None:
        if isinstance(ours, dict):
            assert isinstance(theirs, dict), path
            for key, value in ours.items():
                assert key in theirs, f"{path}.{key}"
                kept(value, theirs[key], f"{path}.{key}")
        elif isinstance(ours, list):
            assert isinstance(theirs, list) and len(ours) == len(theirs), path
            for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                kept(one, other, f"{path}[{index}]")
        else:
            assert ours == theirs, path

    kept(dashboard(), json.loads(json.dumps(Dashboard.from_json(dashboard()), cls=JSONEncoder)), "")


def test_rays_page_asks_for_this_dashboard() -> None:
    found = {variable.name: variable.value for variable in variables("cpu")}
    assert found["RAY_GRAFANA_DATA_DASHBOARD_UID"] == UID == dashboard()["uid"]


def test_alerts_name_metrics_that_exist() -> None:
    rules = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    assert len(rules) >= 5
    for rule in rules:
        named = set(re.findall(r"ray_slipstream_\w+", rule["expr"]))
        assert named and named <= GAUGES, rule["alert"]
    (missing,) = (rule["expr"] for rule in rules if rule["alert"] == "SlipstreamWorkerDown")
    assert gauge("rollout/replicas_wanted") in missing, "a run that was told to have fewer workers lacks none"
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "test", "rules", str(FOLDER / "alerts_test.yml")], check=True)
