"""Block-FP8 engines without a GPU: what was recorded of vLLM's loader, replayed, is what that loader writes.

The model class is built in host memory as one rank of a GPU engine after the other; its parameters are compared as
loaded, which is how the Triton and Cutlass kernels read them. What is recorded before loading (for plans) and on the
loaded model, whose parameters have lost their loaders (in a live engine), is the same. Run by
tests/contract/test_recorder_vllm.py.
"""

from pathlib import Path
from typing import Any

from cases.recorded import replay_plan

CASES = {
    "qwen3_moe of one rank": ("qwen3_moe", 1, False),
    "qwen3_moe cut in two": ("qwen3_moe", 2, False),
    "deepseek_v32 with its experts on two ranks": ("deepseek_v32", 2, True),
    "glm_moe_dsa of one rank": ("glm_moe_dsa", 1, False),
}
"""Model, ranks, and whether whole experts lie on one of them."""


def finish_loading(engine: Any) -> int:
    """What a GPU engine does to block-FP8 layers after loading. Returns how many parameters lost what loads them.

    Linear layers: vLLM's own code, whole. Experts: how it ends, because it goes on to build GPU kernels.
    """
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
    from vllm.model_executor.utils import replace_parameter

    before = dict(engine.named_parameters())
    for module in engine.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Fp8LinearMethod):
            method.process_weights_after_loading(module)
        elif isinstance(method, Fp8MoEMethod):
            for leaf in ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv"):
                replace_parameter(module, leaf, getattr(module, leaf))
    after = dict(engine.named_parameters())
    assert after.keys() == before.keys()
    return sum(type(before[name]) is not type(param) for name, param in after.items())


def compare(folder: Path, case: str) -> None:
    """Raises where what was recorded is not what vLLM loads."""
    import torch
    import torch.distributed as dist
    from fakes.checkpoints import CONFIGS, FOR_GPUS, quantize_checkpoint, write_checkpoint
    from safetensors.torch import load_file
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
    from slipstream.rollout.engine.engine_options import engine_arguments
    from slipstream.rollout.in_vllm.post_load import Forms, load_time_parameters
    from slipstream.rollout.layouts.meta_engine import as_rank
    from slipstream.rollout.types import EngineOptions
    from slipstream.weight_sync.layout import PostLoad, TensorMeta
    from slipstream.weight_sync.record.recorder import record_layout

    model, tp_size, expert_parallel = CASES[case]
    write_checkpoint({**CONFIGS[model], **FOR_GPUS[model]}, folder, seed=1)
    quantize_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    metas = tuple(TensorMeta(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items())
    rollout = RolloutConfig(
        tp_size=tp_size, enable_expert_parallel=expert_parallel, max_model_len=16, max_num_seqs=1,
        sampling=SamplingConfig(max_tokens=1),
    )  # fmt: skip
    arguments = engine_arguments(
        EngineOptions(folder=folder, config=rollout, dtype=DType.bfloat16, device=Device.cpu), seed=0
    )
    config = EngineArgs(**arguments).create_engine_config()
    num_fp8 = num_derived = num_lost = 0
    for rank in range(tp_size):
        with as_rank(config, DType.bfloat16, rank, tp_size, Device.cuda):
            engine: Any = initialize_model(config)
            forms = Forms.on_meta(engine, torch.bfloat16, Device.cuda)
            layout = record_layout(engine.load_weights, forms.params, metas, rank, post_load=forms.post_load)
            engine.load_weights(iter(tensors.items()))
            num_lost += finish_loading(engine)
            forms = Forms.on_meta(engine, torch.bfloat16, Device.cuda)
            before = dict(engine.named_parameters(remove_duplicate=False))
            with load_time_parameters(engine):
                live = record_layout(engine.load_weights, forms.params, metas, rank, post_load=forms.post_load)
            assert live == layout
            after = dict(engine.named_parameters(remove_duplicate=False))
            assert list(before) == list(after)
            assert all(before[name] is after[name] for name in before), "a live parameter did not come back"
        dist.destroy_process_group()
        memory = replay_plan(layout, metas, tensors)
        for param in layout.params:
            if param.post_load is PostLoad.derived:
                num_derived += 1
                continue
            num_fp8 += param.dtype == "float8_e4m3fn"
            mine, theirs = memory[param.name].view(param.shape), forms.params[param.name]
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), (rank, param.name)
    assert rank + 1 == tp_size
    assert num_fp8 > 0
    assert num_lost > 0
    # Two layers have two matrices each. They are made after loading, so nothing loads them.
    assert num_derived == (4 * tp_size if "index_topk" in CONFIGS[model] else 0)
