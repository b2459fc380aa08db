"""docs/metrics.md lists the catalogue of orchestrator.telemetry, word for word."""

from __future__ import annotations

from pathlib import Path

from orchestrator.files.telemetry import METRICS

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"


def test_the_page_lists_every_metric() -> None:
    listed = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    in_a_table = {name: meaning.replace("|", "\\|") for name, meaning in METRICS.items()}
    assert listed == [f"| `{name}` | {meaning} |" for name, meaning in in_a_table.items()]
