"""Every place where Slipstream changes vLLM at run time. vLLM's files, models, kernels and scheduling stay as released.

    patch                         release    what it buys, and until when
    keep_linear_weights_in_place  0.32 CPUs  correctness: linear layers and convolutions compute from parameters, not
                                             from packed copies of them. Until an option of vLLM says so.
    keep_batch_invariance         0.25 GPUs  correctness: with VLLM_BATCH_INVARIANT=1 neither norms of sums nor experts'
                                             adapters depend on the batch. Until vLLM's kernels keep what the variable
                                             promises.
    send_logprobs_together        both       tokens/s: the log-probabilities of a step leave the engine's process as
                                             three arrays. Until vLLM does not send three per request.
    watch_outputs                 both       correctness: the engine's client gives each request its own log-
                                             probabilities again, and shows outputs to a listener before vLLM handles
                                             them. Until outputs carry the version of the weights, or a listener can be
                                             given.
    adapters_from_memory          both       correctness: while slots are recorded, a LoRA manager reads tensors instead
                                             of a file. Until add_adapter() takes tensors.
    kernels_of_gpus               both       correctness: FP8 layers take the kernels of GPUs on a host that has none.
                                             Until a layer can be built without choosing a kernel.
    be_on_cpu_without_gpu         0.25 CPUs  correctness: vLLM's build for GPUs takes a host without one for a CPU's.
                                             Until vLLM can be told its platform.
    be_rank                       both       correctness: process groups that talk to nobody. Until vLLM's groups can be
                                             made so.

"Both" means RELEASES. The first acts on every engine on a CPU, the second on every batch-invariant
one, send_logprobs_together on the process that is forked for an engine (a spawned one goes without), the next two on
the objects of one engine; the last three run in a process that computes nothing (rollout/layouts/). Why none of them
buys seconds of a start: docs/decisions/0035. While a layout is recorded, two more modules swap attributes of a model
and put them back: post_load.py (parameters as they were at load time) and adapter_slots.py (layers without LoRA
wrappers).

Owns: this list, and these changes; each is one call, made by the code that needs it. vLLM is imported inside the
functions, because vllm_engine.py imports this file and must stay cheap to import.
Invariant: a patch raises if its target is missing; none is skipped silently.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.rollout.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.engine.async_llm import AsyncLLM


RELEASES = "0.25.1 (GPUs) and 0.32 (CPUs)"
"""The releases of vLLM that Slipstream supports, for messages."""


def keep_linear_weights_in_place() -> None:
    """Make linear layers on CPUs compute from their parameters. Call it before a model is loaded; a second call is
    harmless.

    With oneDNN (float32, AVX512) or the AMX kernels vLLM moves linear weights into private packed copies while it
    loads. Their parameters become empty, or (lm_head) stay but are no longer read, so a write into live memory would
    change nothing. Convolutions of linear attention are packed in place where the CPU has bfloat16 products.
    """
    import vllm._custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        replace(vllm._custom_ops, "_supports_onednn", False)
        replace(utils, "check_cpu_sgl_kernel", lambda *_: False)
        replace(vllm._custom_ops, "causal_conv1d_weight_pack", lambda weight: weight.unsqueeze(1))
        for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
            replace(vllm._custom_ops, name, functools.partial(_convolve_unpacked, getattr(vllm._custom_ops, name)))


def _convolve_unpacked(
    kernel: Callable[..., Tensor], *, weight: Tensor, is_weight_packed: bool, **given: Any
) -> Tensor:
    """The CPU's convolution, of a parameter of (channels, 1, width)."""
    return kernel(weight=weight.flatten(1), is_weight_packed=False, **given)


def keep_batch_invariance() -> None:
    """With VLLM_BATCH_INVARIANT=1, norms of residual sums use the kernel of all other norms, and experts' adapters are
    added by one kernel. Call it before a model is loaded; again is harmless.

    vLLM's fused norm adds squares in as many parts as a block has threads, 1024 below 256 rows and 256 from there on,
    so that a token's bits depend on how many others are in its batch. For a batch that chooses few experts (rows *
    experts per token * 8 at most experts * slots) vLLM adds their adapters by another kernel, which does not round
    x A^T (both measured: docs/parity.md).
    """
    import vllm.envs

    if not vllm.envs.VLLM_BATCH_INVARIANT:
        return
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.model_executor.layers import layernorm

    norm, align = layernorm.rms_norm_batch_invariant, PunicaWrapperGPU.moe_lora_align_block_size
    if norm.__module__ == __name__:
        return

    def norm_of_sum(input: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
        if residual is None:
            return norm(input, weight, eps)
        residual.add_(input)
        return norm(residual, weight, eps), residual

    def always_sorted(self: Any, *rows: Any, naive_block_assignment: bool = False, **options: Any) -> Any:
        return align(self, *rows, **options)

    replace(layernorm, "rms_norm_batch_invariant", norm_of_sum)
    replace(PunicaWrapperGPU, "moe_lora_align_block_size", always_sorted)


@contextlib.contextmanager
def send_logprobs_together() -> Iterator[None]:
    """While the block runs, and in what is forked in it, an engine sends the log-probabilities of a step together. Its
    client must `watch_outputs`, which gives each output its own rows, as if vLLM had sent them so.

    vLLM sends the id, the log-probability and the rank of each request's token as numpy arrays of one number, and
    encodes and decodes each of them by itself. With a thousand requests that is most of what a step costs the two
    processes beside scheduling, and an EngineCore with so many requests waits for Python, not for its GPU
    (docs/measurements.md).
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import LogprobsLists

    own = Scheduler.update_from_output

    def update_from_output(self: Any, *step: Any, **options: Any) -> Any:
        outputs = own(self, *step, **options)
        for of_client in outputs.values():
            gather(of_client.outputs)
        return outputs

    with (
        replaced(LogprobsLists, {"slice_request": row_of_request}),
        replaced(Scheduler, {"update_from_output": update_from_output}),
    ):
        yield


class Rows(NamedTuple):
    """Some rows of a step's log-probabilities."""

    step: Any
    """vLLM's LogprobsLists."""
    start: int
    end: int


def row_of_request(step: Any, request: int, num_tokens: int) -> Rows:
    """Say which rows of the step are a request's. Takes the place of LogprobsLists.slice_request, which cuts arrays."""
    starts = step.cu_num_generated_tokens
    start = request if starts is None else starts[request]
    return Rows(step, start, start + num_tokens)


def gather(outputs: Sequence[Any]) -> None:
    """Move the rows of all outputs into the first that has any, whose cu_num_generated_tokens says where the rows of
    each output end, from 0 on. (vLLM itself never sends that field.) Outputs are vLLM's EngineCoreOutput of one step,
    in the order in which they are sent; their rows are Rows."""
    first, indices, ends = None, [], [0]
    for output in outputs:
        rows = output.new_logprobs
        if rows is not None:
            first = output if first is None else first
            indices += range(rows.start, rows.end)
        ends.append(len(indices))
    if first is None:
        return
    ids, logprobs, ranks, _ = step = first.new_logprobs.step
    for output in outputs:
        output.new_logprobs = None
    first.new_logprobs = type(step)(ids[indices], logprobs[indices], ranks[indices], ends)


def spread(outputs: Sequence[Any]) -> None:
    """Give each output its own rows; nothing changes where `gather` did not run."""
    sent = next((output.new_logprobs for output in outputs if output.new_logprobs is not None), None)
    if sent is None or sent.cu_num_generated_tokens is None:
        return
    ids, logprobs, ranks, ends = sent
    for output, (start, end) in zip(outputs, itertools.pairwise(ends), strict=True):
        mine = slice(start, end)
        output.new_logprobs = None if start == end else type(sent)(ids[mine], logprobs[mine], ranks[mine], None)


def watch_outputs(llm: AsyncLLM, see: Callable[[Any], None]) -> None:
    """Call `see` with each output (EngineCoreOutput) of an engine that had no request yet, as it leaves the engine's
    queue and before vLLM handles it, but with log-probabilities as vLLM expects them. There is no await between the
    queue and this call."""
    client: Any = llm.engine_core
    get_output = client.get_output_async

    async def get_watched_output() -> Any:
        outputs = await get_output()
        spread(outputs.outputs)
        for output in outputs.outputs:
            see(output)
        return outputs

    client.get_output_async = get_watched_output


def stop_watching(llm: AsyncLLM) -> None:
    """Undo watch_outputs(), which made a cycle that would keep the engine alive."""
    vars(llm.engine_core).pop("get_output_async", None)


@contextlib.contextmanager
def adapters_from_memory(manager: Any, factors: Mapping[str, Tensor]) -> Iterator[str]:
    """While the block runs, vLLM's WorkerLoRAManager reads these factors, by PEFT's names, instead of an adapter's
    file. Yields the folder to name in a LoRARequest. The scale is 1: B arrives multiplied
    (trainer/delivery/adapter_source.py)."""
    from vllm.lora.lora_model import LoRAModel

    class InMemory(LoRAModel):
        @classmethod
        def from_local_checkpoint(cls, *_: Any, **options: Any) -> LoRAModel:  # its arguments differ by release
            known = ("peft_helper", "lora_model_id", "dtype", "model_vocab_size", "weights_mapper", "skip_prefixes")
            chosen = {name: options[name] for name in known if name in options}
            return LoRAModel.from_lora_tensors(tensors=dict(factors), device="meta", **chosen)

    rank = next(tensor.shape[0] for name, tensor in factors.items() if name.endswith("lora_A.weight"))
    folder = tempfile.TemporaryDirectory(prefix="slipstream-adapter-")
    with replaced(manager, {"_lora_model_cls": InMemory}), folder as path:
        described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
        (Path(path) / "adapter_config.json").write_text(json.dumps(described))
        yield path


@contextlib.contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """While the block runs, FP8 layers choose the kernels that engine_arguments asks for on GPUs, even if this host
    cannot run them: a layer's parameters do not depend on the choice, and nothing is computed here. post_load.py
    refuses a live engine that chose others."""
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    of_platform = current_platform.get_attn_backend_cls

    def attention_of(selected_backend: Any, attn_selector_config: Any, **options: Any) -> str:
        """CPUs have no attention to keys that an indexer chooses; this one's constructor asks for no device."""
        if attn_selector_config.use_sparse and current_platform.is_cpu():
            return AttentionBackendEnum.XPU_MLA_SPARSE.get_path()
        return of_platform(selected_backend, attn_selector_config, **options)

    chosen = {
        "init_fp8_linear_kernel": lambda **_: object.__new__(TritonFp8BlockScaledMMKernel),
        "select_fp8_moe_backend": lambda **_: (Fp8MoeBackend.TRITON, None),
    }
    with replaced(fp8, chosen), replaced(current_platform, {"get_attn_backend_cls": attention_of}):
        yield


def be_on_cpu_without_gpu() -> None:
    """On a host without a GPU, give vLLM's build for GPUs its platform of CPUs, which builds models without the GPUs'
    driver, latent attention among them. Call it before the rest of vLLM is imported. Where vLLM finds a platform,
    nothing is changed."""
    from vllm import platforms

    if not platforms.current_platform.is_unspecified():
        return
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class WithoutKernels(CpuPlatform):
        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, **options: Any) -> str:
            if attn_selector_config.use_mla:
                return AttentionBackendEnum.TRITON_MLA.get_path()
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, **options)

    replace(platforms, "_current_platform", WithoutKernels())
    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, "types.SimpleNamespace")  # nothing attends


def be_rank(rank: int, tp_size: int) -> None:
    """Make this process one rank of a tensor-parallel engine without other ranks, on torch's fake process group, which
    the caller ends. vLLM's own constructors would connect to other ranks through gloo and shared memory; a model's asks
    its groups only for sizes and ranks."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state

    dist.init_process_group("fake", rank=rank, world_size=tp_size, store=FakeStore())
    everyone = list(range(tp_size))
    for name in ("_WORLD", "_TP", "_EP"):
        replace(parallel_state, name, _group(everyone, rank, name))
    for name in ("_PP", "_DP", "_DCP", "_PCP", "_EPLB"):
        if hasattr(parallel_state, name):  # releases differ in these; a model that needs a missing one fails
            replace(parallel_state, name, _group([rank], rank, name))


def _group(ranks: list[int], rank: int, name: str) -> GroupCoordinator:
    import torch
    import torch.distributed as dist
    from vllm.distributed.parallel_state import GroupCoordinator

    group = object.__new__(GroupCoordinator)
    process_group = dist.new_group(ranks, backend="fake")
    for field, value in {
        "unique_name": name,
        "rank": rank,
        "local_rank": rank,
        "ranks": ranks,
        "world_size": len(ranks),
        "rank_in_group": ranks.index(rank),
        "cpu_group": process_group,
        "device_group": process_group,
        "device": torch.device("meta"),
        "use_device_communicator": False,
        "device_communicator": None,
        "mq_broadcaster": None,
        "use_custom_op_call": False,
    }.items():
        setattr(group, field, value)
    return group


@contextlib.contextmanager
def replaced(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, attributes of `target` have these values."""
    before = {name: replace(target, name, value) for name, value in values.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def replace(target: Any, name: str, value: Any) -> Any:
    """Set an attribute, and return its old value. Raises EngineError if there is no such attribute."""
    if not hasattr(target, name):
        where = getattr(target, "__name__", type(target).__name__)
        raise EngineError(
            f"{where} has no {name}, which Slipstream replaces; the releases of vLLM that it supports are {RELEASES}, "
            "with the Triton that they ask for"
        )
    before = getattr(target, name)
    setattr(target, name, value)
    return before
