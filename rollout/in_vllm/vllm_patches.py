"""Every place where Slipstream changes vLLM at run time. vLLM's files, models, kernels and scheduling stay as released.

    keep_linear_weights_in_place   0.32   CPUs compute linear layers from parameters, not from packed copies of them.
                                          Until an option of vLLM says so.
    norm_sums_batch_invariantly    0.25   With VLLM_BATCH_INVARIANT=1 the norm of a sum does not depend on the batch.
                                          Until vLLM's fused kernel does not (it claims so).
    add_expert_adapters_batch_invariantly
                                   0.25   With VLLM_BATCH_INVARIANT=1 one kernel adds experts' adapters to any batch.
                                          Until vLLM's choice of kernels does not depend on the batch.
    compile_kernels_beside_model   0.25   On GPUs the kernels of experts, adapters, top-k and top-p are compiled while
                                          the model is (kernels_beside_model.py).
                                          Until vLLM compiles its kernels beside each other.
    send_logprobs_together         both   The log-probabilities of a step leave the engine's process as three arrays
                                          (logprob_rows.py). Until vLLM does not send three per request.
    watch_outputs                  both   The engine's client gives each request its own again, and shows outputs to a
                                          listener before vLLM handles them.
                                          Until outputs carry the version of the weights, or a listener can be given.
    open_no_gpu                    0.25   While vLLM is imported, torchao's questions about Triton and GPUs open none.
                                          Until torchao asks when it needs the answers.
    make_processes_in              both   One engine's EngineCore is forked from a server that has imported vLLM.
                                          Until VLLM_WORKER_MULTIPROC_METHOD may be forkserver.
    make_ranks_in                  0.32   On CPUs an EngineCore that was forked has its ranks forked by the same
                                          server. GPUs have not run it, so there ranks are spawned.
                                          Until VLLM_WORKER_MULTIPROC_METHOD may be forkserver.
    inspect_models_by              both   What a model's class says of itself is found in a process of that server.
                                          Until vLLM can be told where.
    end_for_good                   both   One engine is shut down once. Until AsyncLLM.shutdown() may be called twice.
    adapters_from_memory           both   While slots are recorded, a LoRA manager reads tensors instead of a file.
                                          Until add_adapter() takes tensors.
    kernels_of_gpus                both   FP8 layers take the kernels of GPUs on a host that has none.
                                          Until a layer can be built without choosing a kernel.
    be_on_cpu_without_gpu          0.25   vLLM's build for GPUs takes a host without one for a CPU's.
                                          Until vLLM can be told its platform.
    be_rank                        both   Process groups that talk to nobody. Until vLLM's groups can be made so.

"Both" means 0.25.1 (GPUs) and 0.32 (CPUs); the last sentence of each entry says when the patch can go. The first patch
acts on every engine on a CPU, the next two on every batch-invariant one, compile_kernels_beside_model on every engine
on a GPU, send_logprobs_together on the processes of a worker's engine, open_no_gpu on imports, make_ranks_in on forked
processes, the other five before the last three on the objects of one engine; the last three run in a process that
computes nothing (rollout/layouts/). While a layout is recorded, two more modules swap attributes of a model and
put them back: load_time.py (parameters as they were at load time) and adapter_slots.py (layers without LoRA wrappers).

Owns this list, and these changes but for compile_kernels_beside_model, which has a file of its own. Does not own when
they are made: each is one call, made by the code that needs it. vLLM is imported inside the functions, because
engine.py imports this file and must stay cheap to import.
Invariant: a patch raises if its target is missing; none is skipped silently.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.in_vllm.logprob_rows import gather, row_of_request, spread
from rollout.in_vllm.replaced import replace, replaced

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
T = TypeVar("T")


def keep_linear_weights_in_place() -> None:
    """Make linear layers on CPUs compute from their parameters. Call it before a model is loaded; a second call is
    harmless.

    With oneDNN (float32, AVX512) or the AMX kernels vLLM moves linear weights into private packed copies while it
    loads. Their parameters become empty, or (lm_head) stay but are no longer read, so a write into live memory would
    change nothing.
    """
    import vllm._custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        replace(vllm._custom_ops, "_supports_onednn", False)
        replace(utils, "check_cpu_sgl_kernel", lambda *_: False)


def norm_sums_batch_invariantly() -> None:
    """With VLLM_BATCH_INVARIANT=1, norms of residual sums use the kernel of all other norms. Call it before a model is
    loaded; again is harmless.

    vLLM's fused kernel adds squares in as many parts as a block has threads, 1024 below 256 rows and 256 from there on,
    so that a token's bits depend on how many others are in its batch (measured: docs/parity.md).
    """
    import vllm.envs

    if not vllm.envs.VLLM_BATCH_INVARIANT:
        return
    from vllm.model_executor.layers import layernorm

    norm = layernorm.rms_norm_batch_invariant
    if norm.__module__ == __name__:
        return

    def norm_of_sum(input: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
        if residual is None:
            return norm(input, weight, eps)
        residual.add_(input)
        return norm(residual, weight, eps), residual

    replace(layernorm, "rms_norm_batch_invariant", norm_of_sum)


def add_expert_adapters_batch_invariantly() -> None:
    """With VLLM_BATCH_INVARIANT=1, experts' adapters are added by one kernel. Call it before a model is loaded; again
    is harmless.

    For a batch that chooses few experts (rows * experts per token * 8 at most experts * slots) vLLM takes another one,
    which does not round x A^T (measured: docs/parity.md).
    """
    import vllm.envs

    if not vllm.envs.VLLM_BATCH_INVARIANT:
        return
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    align = PunicaWrapperGPU.moe_lora_align_block_size
    if align.__module__ == __name__:
        return

    def always_sorted(self: Any, *rows: Any, naive_block_assignment: bool = False, **options: Any) -> Any:
        return align(self, *rows, **options)

    replace(PunicaWrapperGPU, "moe_lora_align_block_size", always_sorted)


@contextlib.contextmanager
def open_no_gpu() -> Iterator[None]:
    """While the block runs, torch's has_triton() looks for Triton and for GPUs, and its get_device_capability() asks
    vLLM's platform; both through the driver's management library.

    vLLM 0.25.1 imports torchao, which asks both as it is imported (utils.py, mx_formats/kernels.py). Torch's own
    answers open the GPU: the process then keeps half a GB of it for nothing, and no process that is forked from it can
    use a GPU.
    """
    import torch
    from torch.utils import _triton

    has_triton = find_spec("triton") is not None and torch.cuda.device_count() > 0
    by_torch = torch.cuda.get_device_capability

    def capability(device: Any = None) -> tuple[int, int]:
        from vllm.platforms import current_platform

        found = current_platform.get_device_capability() if device is None else None
        return by_torch(device) if found is None else (found.major, found.minor)

    with (
        replaced(_triton, {"has_triton": lambda: has_triton}),
        replaced(torch.cuda, {"get_device_capability": capability}),
    ):
        yield


@contextlib.contextmanager
def make_processes_in(context: BaseContext) -> Iterator[None]:
    """While the block runs, vLLM makes EngineCore processes in this context of multiprocessing."""
    from vllm.v1.engine import utils

    own = utils.get_mp_context

    def chosen() -> BaseContext:
        own()  # it also sets what the EngineCore's own processes read
        return context

    with replaced(utils, {"get_mp_context": chosen}):
        yield


def make_ranks_in(choose: Callable[[], BaseContext | None]) -> None:
    """From now on an EngineCore of this process, or of one forked from it, makes its ranks (tp_size > 1) in the context
    of multiprocessing that `choose` names; in vLLM's own where it names none, and for ranks on GPUs. A second call is
    harmless.
    """
    from vllm.platforms import current_platform
    from vllm.v1.executor import multiproc_executor

    if not current_platform.is_cpu():
        return
    own = multiproc_executor.get_mp_context
    if own.__module__ == __name__:
        return

    def chosen() -> BaseContext:
        default = own()  # it also sets what ranks read
        return choose() or default

    replace(multiproc_executor, "get_mp_context", chosen)


@contextlib.contextmanager
def inspect_models_by(call: Callable[[Callable[[], T]], T]) -> Iterator[None]:
    """While the block runs, vLLM asks a model's class what it can do by `call`, and if that fails by its own way: in a
    process that imports all of vLLM first. (vLLM keeps the answers in its cache folder.)
    """
    from vllm.model_executor.models import registry

    own = registry._run_in_subprocess

    def asked(function: Callable[[], T]) -> T:
        try:
            return call(function)
        except RuntimeError as error:
            logger.warning("a model's class was not inspected in a forked process: %s", error)
            return own(function)

    with replaced(registry, {"_run_in_subprocess": asked}):
        yield


def send_logprobs_together() -> None:
    """In a process that will run an engine: send the log-probabilities of a step together. The engine's client must
    `watch_outputs`. A second call is harmless.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import LogprobsLists

    own = Scheduler.update_from_output
    if own.__module__ == __name__:
        return

    def update_from_output(self: Any, *step: Any, **options: Any) -> Any:
        outputs = own(self, *step, **options)
        for of_client in outputs.values():
            gather(of_client.outputs)
        return outputs

    replace(LogprobsLists, "slice_request", row_of_request)
    replace(Scheduler, "update_from_output", update_from_output)


def watch_outputs(llm: AsyncLLM, see: Callable[[Any], None]) -> None:
    """Call `see` with each output of the engine, as it leaves the engine's queue and before vLLM handles it, but with
    log-probabilities as vLLM expects them.

    Args:
        llm: Built, but without any request yet: its handler takes the method at the first request.
        see: Gets vLLM's EngineCoreOutput; there is no await between the queue and this call.
    """
    client: Any = llm.engine_core
    get_output = client.get_output_async

    async def get_watched_output() -> Any:
        outputs = await get_output()
        spread(outputs.outputs)
        for output in outputs.outputs:
            see(output)
        return outputs

    client.get_output_async = get_watched_output


def end_for_good(llm: AsyncLLM, timeout_s: float) -> None:
    """Shut the engine down, and prevent a second shutdown.

    AsyncLLM's __del__ would shut it down again when this process ends, after its modules are gone.
    """
    owned: Any = llm
    owned.engine_core.__dict__.pop("get_output_async", None)  # watch_outputs() made a cycle that keeps the engine alive
    owned.shutdown(timeout=timeout_s)
    owned.shutdown = lambda: None


@contextlib.contextmanager
def adapters_from_memory(manager: Any, factors: Mapping[str, Tensor]) -> Iterator[str]:
    """While the block runs, vLLM's LoRA manager reads these tensors instead of an adapter's file.

    Args:
        manager: vLLM's WorkerLoRAManager.
        factors: Every factor by its name in PEFT's format.

    Yields:
        The folder to name in a LoRARequest. The scale is 1: B arrives multiplied (trainer/delivery/adapter_source.py).
    """
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
    cannot run them.

    A layer chooses when it is built, its parameters do not depend on the choice, and nothing is computed here.
    post_load.py refuses a live engine that chose others.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8

    chosen = {
        "init_fp8_linear_kernel": lambda **_: object.__new__(TritonFp8BlockScaledMMKernel),
        "select_fp8_moe_backend": lambda **_: (Fp8MoeBackend.TRITON, None),
    }
    with replaced(fp8, chosen):
        yield


def be_on_cpu_without_gpu() -> None:
    """On a host without a GPU, give vLLM's build for GPUs its platform of CPUs, which builds models without the GPUs'
    driver, latent attention among them. Call it before the rest of vLLM is imported. Where vLLM finds a platform,
    nothing is changed.
    """
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
    """Make this process one rank of a tensor-parallel engine without other ranks, on torch's fake process group.

    vLLM's own constructors would connect to other ranks through gloo and shared memory. A model's constructor asks its
    groups only for sizes and ranks. The caller ends the process group.
    """
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
