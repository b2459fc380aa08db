"""The recorder against vLLM's own loaders: what was recorded, replayed, is what vLLM's `load_weights` writes.

One process per model, because an engine owns its process. Each builds a tiny random checkpoint, starts vLLM with dummy
weights, records its loader, and then lets the same loader load the real tensors as the oracle. Experts are compared as
loaded, before any repacking by a CPU backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("model", ["qwen3_tied", "qwen3", "qwen3_moe"])
def test_recorded_loads_are_what_vllm_loads(model, tmp_path):
    pytest.importorskip("vllm")
    env = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, __file__, model, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def replay_plan(layout, metas, tensors):
    """Send everything by a plan of two trainer ranks; returns flat memory per parameter."""
    import torch

    from weight_sync.layout import Region, SourceLayout, SourceShard
    from weight_sync.plan.plan import build_plan

    sources = []
    for rank in range(2):
        shards = []
        for meta in metas:
            half = -(-meta.shape[0] // 2)
            first, stop = rank * half, min((rank + 1) * half, meta.shape[0])
            rest = meta.shape[1:]
            shards.append(SourceShard(meta.name, Region((first, *(0,) * len(rest)), (stop - first, *rest))))
        sources.append(SourceLayout(rank, metas, tuple(shards)))
    plan = build_plan(sources, [[layout]], max_task_bytes=5000)
    memory = {p.name: torch.zeros(p.num_elements, dtype=getattr(torch, p.dtype)) for p in layout.params}
    for rank in range(2):
        for task in plan.tasks[rank]:
            flat = memory[task.param]
            for piece in task.pieces:
                window = tuple(slice(a, b) for a, b in zip(piece.region.start, piece.region.stop, strict=True))
                block = tensors[piece.tensor][window].permute(piece.axes).reshape(-1)
                first = task.dest_offset_bytes // flat.element_size() + piece.offset_elements
                flat[first : first + block.numel()] = block
    for fill in layout.fills:
        memory[fill.param][fill.offset : fill.offset + fill.num_elements] = fill.value
    return memory


def main(model_name: str, folder: str) -> None:
    """Runs in a process of its own."""
    from fakes.checkpoints import CONFIGS, write_checkpoint
    from safetensors.torch import load_file

    write_checkpoint(CONFIGS[model_name], Path(folder), seed=0)
    tensors = load_file(f"{folder}/model.safetensors")

    import torch
    from vllm import LLM

    from rollout.in_vllm.vllm_patches import keep_linear_weights_in_place
    from weight_sync.layout import TensorMeta
    from weight_sync.record.recorder import record_layout

    keep_linear_weights_in_place()
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        dtype="bfloat16",
        kv_cache_memory_bytes=16 << 20,
    )
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    model = executor.driver_worker.worker.model_runner.model
    params = dict(model.named_parameters())
    before = {name: param.detach().clone() for name, param in params.items()}
    metas = tuple(TensorMeta(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items())
    layout = record_layout(model.load_weights, params, metas, 0)
    for name, param in params.items():
        assert torch.equal(param.view(torch.uint8), before[name].view(torch.uint8)), f"recording changed {name}"

    model.load_weights(iter(tensors.items()))
    memory = replay_plan(layout, metas, tensors)
    assert set(memory) == set(params)
    for name, param in params.items():
        assert torch.equal(memory[name].view(param.shape), param), name
    print(len(layout.loads), layout.fills, flush=True)
    os._exit(0)  # skip vLLM's shutdown


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
