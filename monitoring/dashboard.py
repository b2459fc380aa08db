"""Grafana's dashboard of runs: monitoring/dashboard.json is written from the list of panels here.

    python monitoring/dashboard.py > monitoring/dashboard.json

Ray's page embeds it in the tab that is Ray Data's otherwise: it asks Grafana for the dashboard whose uid is
RAY_GRAFANA_DATA_DASHBOARD_UID (orchestrator/environment.py), with Ray's session as the variable SessionName.

Owns: which metrics are shown together, and their units. Does not own: what metrics there are
(orchestrator/metrics/catalogue.py), how they reach Prometheus (orchestrator/metrics/loggers.py). Pure.
"""

import json
from typing import Any, NamedTuple

UID = "slipstream"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One picture. Example: Panel("Step, s", "s", ("step/total_s", "rollout/wait_s"))."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    is_logarithmic: bool = False


PANELS = (
    Panel("Reward", "none", ("reward/mean", "eval/reward")),
    Panel("Loss of fine-tuning, nats per token", "none", ("sft/nll", "eval/nll")),
    Panel("Loss of pairs", "none", ("dpo/loss", "eval/dpo_loss")),
    Panel("Pairs in the right order", "percentunit", ("dpo/accuracy", "eval/dpo_accuracy")),
    Panel("Policy version, by step", "none", ("step", "policy_version")),
    Panel("Mismatch of trainer and engine (k3)", "none", ("parity/k3", "parity/floor_k3", "parity/k3_stale"), True),
    Panel("Entropy, nats per token", "none", ("policy/entropy",)),
    Panel("Gradient norm", "none", ("optim/grad_norm",), True),
    Panel("Staleness, steps", "none", ("staleness/mean", "staleness/max", "staleness/dropped_groups")),
    Panel(
        "Rollout workers",
        "none",
        ("rollout/replicas_serving", "rollout/replicas_wanted", "rollout/restarts", "rollout/recoveries"),
    ),
    Panel("What failed", "none", ("reward/failures", "rollout/groups_failed", "optim/skipped")),
    Panel("A step", "s", ("step/total_s", "rollout/wait_s", "trainer/forward_backward_s", "sync/total_s")),
    Panel("A publish", "s", ("sync/pause_s", "sync/begin_s", "sync/write_s", "sync/verify_s", "sync/commit_s")),
    Panel("Memory of a publish against the watermark", "bytes", ("sync/peak_bytes", "sync/watermark_bytes")),
    Panel("Tokens per second", "none", ("rollout/tokens_per_s", "trainer/tokens_per_s_per_rank")),
    Panel("Responses, tokens", "none", ("rollout/response_tokens_mean",)),
    Panel("Cut off by length", "percentunit", ("rollout/truncated_fraction",)),
)


def gauge(metric: str) -> str:
    """Prometheus' name of a metric. Example: gauge("sync/total_s") == "ray_slipstream_sync_total_s"."""
    return "ray_slipstream_" + metric.replace("/", "_")


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana's JSON model."""
    return {
        "uid": UID,
        "title": "Slipstream",
        "tags": ["slipstream"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 38,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_data_source(), _session()]},
        "annotations": {"list": []},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _session() -> dict[str, Any]:
    return {
        "name": "SessionName",
        "label": "Ray's session",
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values({gauge('step')}, SessionName)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": False,
        "sort": 2,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    scale = {"type": "log", "log": 10} if panel.is_logarithmic else {"type": "linear"}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {
            "x": number % _COLUMNS * _WIDTH,
            "y": number // _COLUMNS * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": {"scaleDistribution": scale, "lineWidth": 1}},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": gauge(metric) + '{SessionName=~"$SessionName"}',
                "legendFormat": metric,
            }
            for index, metric in enumerate(panel.metrics)
        ],
    }


def main() -> None:
    """Print the file."""
    import sys

    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
