"""Bench scripts read the files that they wrote on GPUs."""

import json
import re
from pathlib import Path

import pytest

from bench import parity, parity_row
from bench.parity_shapes import ROWS
from bench.sync.figures import show
from slipstream.conf.schema import TrainerConfig

RESULTS = Path(__file__).parents[3] / "bench" / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("weight_sync-gpu-[12]x[12]*.json")), ids=lambda file: file.stem)
def test_the_table_of_a_publish_can_be_drawn_from_every_kept_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads(file.read_text())
    show(report)
    shown = capsys.readouterr().out
    assert shown.count("hashes cost") == len(report["engines"])
    assert all(peer in shown for engine in report["engines"] for peer in engine["peers"])


def test_the_table_of_parity_shows_what_a_row_has_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def figures(k3: float) -> dict[str, float]:
        return {"k3_mean": k3, "max_abs_log_ratio": 0.5}

    matrix = {"engine prefill": figures(0.002), "trainer": figures(0.004), "combine=hf_eager": figures(0.005)}
    rows = {"whole": {"entropy": 8.3, "matrix": matrix}, "broken": {"failed": "exit code 1"}}
    parity.print_table({"rows": rows})
    shown = capsys.readouterr().out
    assert "4.00e-03, 0.5" in shown
    assert re.search(r"combine=hf_eager +5.00e-03, 0.5 +2.50 x the floor", shown)
    assert "failed: exit code 1" in shown


def test_every_switch_of_parity_s_rows_is_an_option_of_the_trainer() -> None:
    for name, row in ROWS.items():
        for label in row.others:
            for option in [] if label == "replay" else label.split(","):
                parity_row.with_option(TrainerConfig(), *option.split("="))
        assert row.config(tiny=True)["num_hidden_layers"] <= 3, name
