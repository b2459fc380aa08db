"""Launches and writes of a publish: the plan of a real shape, its loads and their joined reads, but no values."""

import pytest
import torch
from cases.tiny_configs import MOE
from cases.tiny_models import trainer_config
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.vllm_layout import engine_layouts

from slipstream.conf.architecture.families import read_config
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.weight_sync.pipeline.packing import packed_reads
from slipstream.weight_sync.pipeline.pipeline import Pipeline
from slipstream.weight_sync.plan.budget import scratch_bytes
from slipstream.weight_sync.plan.plan import build_plan

TWO_LAYERS = {
    **MOE,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
}
"""Qwen3-30B-A3B's sizes; a layer has 1.21 GB of experts."""


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_config(TWO_LAYERS)


@pytest.fixture(scope="module")
def source(spec) -> TrainerWeightSource:
    """One rank that holds everything, on meta."""
    return TrainerWeightSource(build_decoder(spec, dtype=torch.bfloat16, device="meta", trainer=trainer_config()), 0)


@pytest.mark.parametrize(
    ("tp_size", "watermark_bytes", "num_launches", "num_writes"),
    # Loads that hold tasks in the schedule's order take 356, 390, 62 and 102 launches.
    [(2, 64 << 20, 200, 160), (4, 64 << 20, 388, 319), (2, 1 << 30, 54, 11), (4, 1 << 30, 100, 21)],
)
def test_a_load_serves_all_destinations_alike_and_packs_what_each_gets_of_a_stack_in_one_launch(
    source, spec, tp_size, watermark_bytes, num_launches, num_writes
):
    watermark_bytes += source.temporary_bytes  # which are 0 on a GPU: its merge needs no scratch
    watermark_bytes += scratch_bytes("cpu", watermark_bytes)
    pipeline = Pipeline(source, MemoryTransport(MemoryFabric()), device="cpu", watermark_bytes=watermark_bytes)
    plan = build_plan([source.layout()], [engine_layouts(spec, tp_size)], max_task_bytes=pipeline.max_task_bytes)
    pipeline.compile(plan.tasks[0])
    launches: list[int] = []
    writes: list[int] = []
    sent = [0] * tp_size
    for packets in pipeline.loads:
        tasks = [packet.tasks[0] for packet in packets]
        launches.append(len(source.joined(packed_reads(packets))))
        writes.append(len({task.dest_rank for task in tasks}))
        if all(task.mesh_group == "experts" for task in tasks):
            assert launches[-1] == len({(task.param, task.dest_rank) for task in tasks})
        for task in tasks:
            sent[task.dest_rank] += task.num_bytes
        assert max(sent) - min(sent) <= plan.max_task_bytes
    assert sum(launches) <= num_launches
    assert sum(writes) <= num_writes
