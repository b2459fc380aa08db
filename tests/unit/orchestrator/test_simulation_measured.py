"""The simulator against every publish of one rank into one engine that bench/weight_sync.py measured on GPUs.

A comparison of committed JSON with arithmetic: it needs no GPU and gives the same on every machine.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Device, LoraConfig, TrainerConfig
from trainer.model.spec import ModelSpec
from trainer.offline import source_layouts, temporary_bytes
from weight_sync.layout import DestLayout, Load, Param, Region
from weight_sync.links import LinkRates, place
from weight_sync.plan import build_plan
from weight_sync.simulate import Staging, reserved_bytes, simulate

RESULTS = Path(__file__).parents[3] / "bench" / "results"
BOUND = 0.15
IDLE = {"begin_s": 2.7e-3, "commit_s": 2.3e-3}
"""`--engine plain`: parameters and nothing else, so there is no engine to pause."""
FUSED = (
    (r"(.*)\.[qkv]_proj\.weight", r"\1.qkv_proj.weight"),
    (r"(.*\.experts)\.\d+\.(?:gate|up)_proj\.weight", r"\1.w13_weight"),
    (r"(.*\.experts)\.\d+\.down_proj\.weight", r"\1.w2_weight"),
)


def measured() -> list[Any]:
    """(file, report, row) of every publish of one rank into one engine."""
    found: list[Any] = []
    for file in sorted(RESULTS.glob("weight_sync-gpu-*.json")):
        report = json.loads(file.read_text())
        for row in report.get("results", []):
            name = f"{file.stem}-{row['watermark_bytes'] >> 20}MiB"
            found.append(pytest.param(report, row, id=name))
    return found


def engine_layout(config: dict[str, Any]) -> DestLayout:
    """vLLM's parameters at tp_size=1: fused projections and stacked experts below each other."""
    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    loads: list[Load] = []
    for meta in ModelSpec.from_hf_config(config).checkpoint_tensors("bfloat16"):
        name = meta.name
        for pattern, fused in FUSED:
            name = re.sub(f"^{pattern}$", fused, name)
        stride = (meta.shape[1], 1) if len(meta.shape) == 2 else (1,)
        offset = rows.get(name, 0) * stride[0]
        region = Region((0,) * len(meta.shape), meta.shape)
        loads.append(Load(meta.name, region, tuple(range(len(meta.shape))), name, offset, stride))
        rows[name] = rows.get(name, 0) + meta.shape[0]
        shapes[name] = (rows[name], *meta.shape[1:])
    return DestLayout(0, tuple(Param(name, shape, "bfloat16") for name, shape in shapes.items()), tuple(loads))


@pytest.mark.parametrize(("report", "row"), measured())
def test_the_simulator_is_within_15_percent_of_what_was_measured(report: dict[str, Any], row: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf_config(report["model"])
    trainer = TrainerConfig(lora=LoraConfig(rank=report["lora_rank"]))
    watermark = row["watermark_bytes"]
    held = reserved_bytes("cuda", watermark, temporary_bytes(spec, trainer, Device.cuda))
    staging = Staging(watermark_bytes=watermark, reserved_bytes=held)
    plan = build_plan(
        source_layouts(spec, "bfloat16", trainer),
        [[engine_layout(report["model"])]],
        max_task_bytes=staging.max_task_bytes,
    )
    rates = dataclasses.replace(LinkRates(), **(IDLE if report["engine"] == "plain" else {}))
    found = simulate(plan, place([0], [(0, 0)], 8), rates, staging)
    writes = [one for one in found.ranks[0].intervals if one.stage == "write"]
    assert (plan.summary().num_bytes, len(writes)) == (row["num_bytes"], row["num_loads"])
    assert found.write_s == pytest.approx(row["write_s"], rel=BOUND)
    assert found.write_end_s - found.begin_s == pytest.approx(row["pipeline_s"], rel=BOUND)
    assert found.total_s == pytest.approx(row["total_s"], rel=BOUND)


def test_there_are_measured_publishes_to_compare_with() -> None:
    assert len(measured()) >= 4
