"""docs/metrics.md lists the catalogue of metrics, word for word, and every event of fleet.jsonl."""

from pathlib import Path

from slipstream.fleet.fleet_log import FleetEvent
from slipstream.orchestrator.files.held_out import PASS_METRICS, SET_METRICS
from slipstream.orchestrator.files.metrics_catalogue import JUDGE_METRICS, METRICS, REWARD_METRICS

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
