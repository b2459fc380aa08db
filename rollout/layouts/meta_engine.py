"""Records an engine's layouts without starting it: builds its model class on meta, rank by rank, in its own process.

    python -m slipstream.rollout.layouts REQUEST.json LAYOUTS   started by offline_layout.py, which says what both hold

Owns: standing in for the processes of a tensor-parallel engine, with process groups that do not communicate and weights
without memory.
Invariant: the layout of a rank equals the one that `worker_extension.py` reports inside a live engine of the same
options, because the same code makes it: engine_arguments, vLLM's model class and its `load_weights`, record_layout. (Of
layers that are alike only two are recorded, unless all are asked for: repeated_layers.py.)
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from slipstream.conf.failures import in_words, outcome_of
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
from slipstream.rollout.die_with_owner import OWNER_VARIABLE, end_with
from slipstream.rollout.engine.engine_options import architectures_of, engine_arguments
from slipstream.rollout.in_vllm.post_load import Forms
from slipstream.rollout.in_vllm.process_imports import ask_classes_here
from slipstream.rollout.in_vllm.vllm_patches import be_rank, kernels_of_gpus
from slipstream.rollout.layouts.offline_layout import PROGRESS_MARK
from slipstream.rollout.types import EngineOptions
from slipstream.weight_sync.layout import DestLayout, TensorMeta
from slipstream.weight_sync.record.layout_wire import layouts_to_bytes
from slipstream.weight_sync.record.recorder import record_layout
from slipstream.weight_sync.record.repeated_layers import record_repeating

_ALLOCATING: frozenset[Callable[..., Any]] = frozenset(
    {torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange}
)


class _WithoutMemory(TorchFunctionMode):
    """Allocates floating-point tensors on meta. Integer tensors stay real, because vLLM reads its expert maps."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        is_float = func is not torch.arange if dtype is None else dtype.is_floating_point
        if func in _ALLOCATING and is_float:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def record_all(request: JsonObject) -> tuple[DestLayout, ...]:
    """Record every rank of the engine that a request of offline_layout.py describes."""
    tensors = [TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in request["tensors"]]
    dtype, tp_size = DType(request["dtype"]), int(request["tp_size"])
    rollout = RolloutConfig(  # a layout does not depend on lengths and batch sizes
        tp_size=tp_size,
        enable_expert_parallel=bool(request["enable_expert_parallel"]),
        max_model_len=16,
        max_num_seqs=1,
        sampling=SamplingConfig(max_tokens=1),
    )
    here = Device.cpu if current_platform.is_cpu() else Device.cuda
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(request["hf_config"]))
        arguments = engine_arguments(
            EngineOptions(folder=Path(folder), config=rollout, dtype=dtype, device=here), seed=0
        )
        if arguments.get("attention_backend") not in AttentionBackendEnum.__members__:
            arguments.pop("attention_backend", None)  # the build for GPUs lacks those of CPUs; nothing attends here
        ask_classes_here(architectures_of(Path(folder)))
        config = EngineArgs(**arguments).create_engine_config()
        record = record_layout if request["every_layer"] else record_repeating
        layouts: list[DestLayout] = []
        for rank in range(tp_size):
            layouts.append(_record_rank(config, dtype, rank, tp_size, tensors, Device(request["device"]), record))
            sys.stdout.write(f"\n{PROGRESS_MARK}recorded rank {rank + 1} of {tp_size}\n")
            sys.stdout.flush()
        return tuple(layouts)


def _record_rank(
    config: VllmConfig,
    dtype: DType,
    rank: int,
    tp_size: int,
    tensors: list[TensorMeta],
    device: Device,
    record: Callable[..., DestLayout],
) -> DestLayout:
    try:
        with as_rank(config, dtype, rank, tp_size, device):
            with _WithoutMemory():
                model: Any = initialize_model(config)
            forms = Forms.on_meta(model, getattr(torch, dtype), device)
            return record(model.load_weights, forms.params, tensors, rank, post_load=forms.post_load)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def as_rank(config: VllmConfig, dtype: DType, rank: int, tp_size: int, device: Device) -> Iterator[None]:
    """While the block runs, models are built and loaded as on this rank of an engine on such a device. The caller
    destroys the process group."""
    be_rank(rank, tp_size)
    config.parallel_config.rank = rank
    config.compilation_config.static_forward_context.clear()  # the previous rank's layers have the same names
    kernels = kernels_of_gpus() if device is Device.cuda else contextlib.nullcontext()
    with set_current_vllm_config(config), set_default_torch_dtype(getattr(torch, dtype)), kernels:
        yield


def main(request_file: str, layouts_file: str) -> int:
    """Entry point. offline_layout.py reads the last line of the error output."""
    end_with(int(os.environ.get(OWNER_VARIABLE, os.getpid())))
    layouts = outcome_of(lambda: record_all(json.loads(Path(request_file).read_text())))
    if isinstance(layouts, Exception):
        sys.stderr.write(f"\nerror: {' '.join(in_words(layouts).split())}\n")
        return 1
    Path(layouts_file).write_bytes(layouts_to_bytes(layouts))
    return 0
