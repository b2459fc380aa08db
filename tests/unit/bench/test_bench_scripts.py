"""Bench scripts run at a tiny size on a CPU, and read the files that they wrote on GPUs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import parity, parity_row
from bench.parity_shapes import ROWS
from bench.sync.figures import show
from slipstream.conf.schema import TrainerConfig

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"
RUN_ALL = """
import importlib, sys
from pathlib import Path

out = Path(sys.argv[1])
plan = "--layers 2 --experts-per-layer 32 --sources 16 --ep-size 16 --replicas 2"
for script, words in {
    "ladder": f"--tiny --repeats 1 --out {out}/ladder.json",
    "moe_block": f"--tiny --tables block --out {out}/moe_block.json",
    "plan": f"{plan} --out {out}/plan.json",
    "replay_cost": f"--tiny --part trainer --rounds 1 --out {out}/replay_cost.json",
}.items():
    sys.argv = [script, *words.split()]
    importlib.import_module(f"bench.{script}").main()
"""
"""In one process: what takes time is importing torch."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what the scripts wrote."""
    folder = tmp_path_factory.mktemp("bench")
    ran = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


def test_every_report_names_its_commit_and_the_libraries_that_its_rows_run(written: Path) -> None:
    for name in ("ladder", "moe_block", "plan", "replay_cost"):
        environment = json.loads((written / f"{name}.json").read_text())["environment"]
        assert environment["torch"] == torch.__version__
        assert {"commit", "is_dirty", "cpu_cores", "gpus", "transformers", "peft", "triton"} <= environment.keys()


def test_the_ladder_trains_the_same_tokens_on_every_rung(written: Path) -> None:
    report = json.loads((written / "ladder.json").read_text())
    trained = [rung["tokens_per_s"] * rung["step_s"] for rung in report["rungs"]]
    assert trained == pytest.approx([sum(report["lengths"])] * 5)


def test_the_block_is_timed_frozen_and_with_adapters_of_both_ranks_and_formats(written: Path) -> None:
    rows = json.loads((written / "moe_block.json").read_text())["block"]
    assert {(row["adapters"], row["rank"]) for row in rows} == {
        ("frozen", 0), ("float32", 16), ("bfloat16", 16), ("float32", 64), ("bfloat16", 64),
    }  # fmt: skip
    assert all(row["overhead"] == row["both_s"] / rows[0]["both_s"] - 1 for row in rows[:5])


def test_the_price_of_replay_is_of_equal_steps(written: Path) -> None:
    trainer = json.loads((written / "replay_cost.json").read_text())["trainer"]
    assert trainer["free_tokens_per_s"] == 256 / trainer["free_s"][0]
    assert trainer["cost"] == pytest.approx(1 - trainer["free_s"][0] / trainer["replayed_s"][0])


def test_the_small_plan_is_proven_and_predicted(written: Path) -> None:
    report = json.loads((written / "plan.json").read_text())
    assert report["tasks"] > 0
    assert report["predicted_50"]["total_s"] < report["predicted_44"]["total_s"]
    assert report["predicted_50"]["total_s"] >= report["predicted_50"]["receiver_floor_s"]


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
    rows = {"whole": {"entropy": 8.3, "matrix": matrix, "old": {"trainer": 0.02}}, "broken": {"failed": "exit code 1"}}
    parity.print_table({"rows": rows})
    shown = capsys.readouterr().out
    assert "4.00e-03, 0.5 (was 0.02)" in shown
    assert re.search(r"combine=hf_eager +5.00e-03, 0.5 +2.50 x the floor", shown)
    assert "failed: exit code 1" in shown


def test_every_switch_of_parity_s_rows_is_an_option_of_the_trainer() -> None:
    for name, row in ROWS.items():
        for label in row.others:
            for option in [] if label == "replay" else label.split(","):
                parity_row.with_option(TrainerConfig(), *option.split("="))
        assert row.config(tiny=True)["num_hidden_layers"] <= 3, name
