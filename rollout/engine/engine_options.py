"""What an engine is started with on either device: environment, arguments, room for its cache, warm-up lengths.

Uses only what vLLM 0.25.1 (GPUs) and 0.32 (CPUs) have in common. Pure: starts nothing and imports no vLLM.
"""

import ast
import json
import math
import os
from collections.abc import Iterable, MutableMapping
from importlib.util import find_spec
from pathlib import Path

from slipstream.conf.architecture.families import family_of, of_language_model
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Device, RolloutConfig
from slipstream.rollout.errors import EngineError
from slipstream.rollout.node_cache import cache_folder
from slipstream.rollout.types import LANGUAGE_MODEL, AdapterSlotsSpec, EngineOptions
from slipstream.weight_sync.layout import DTYPE_BYTES, TensorMeta

NUM_SEQS = 256
"""rollout.max_num_seqs of an engine that is not a run's."""
CPU_KV_CACHE_BYTES = 256 << 20
CPU_RANK_BYTES = 400 << 20
"""Memory of an engine's rank on CPUs, without weights and KV cache. Measured (Pss) with the quick start: 470 MB with a
cache of 64 MiB."""
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Where vLLM puts Unix sockets."""
METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
"""How vLLM makes an engine's processes: fork, which is its default, or spawn."""
FLASH_ATTENTION_4 = ("cutlass", "quack")
"""Packages that compile its kernels."""
OTHER_BYTES = 3 << 30
"""CUDA's context, CUDA graphs, and activations of a small model: what an engine takes besides weights and cache."""
BATCH_INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"
"""1: vLLM's batch-invariant kernels, in every process of the engine."""


def compile_cache() -> dict[str, str]:
    """Where PyTorch keeps compiled code: by default under TMPDIR, which ends with a run or a server."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "torchinductor")}


def engine_environment(device: Device) -> dict[str, str]:
    """Environment of a rollout worker's process; set it before torch is imported there. Variables that are already set
    keep their values.

    CPU: with VLLM_ENABLE_V1_MULTIPROCESSING=0 the model lives inside the EngineCore process instead of a third one,
    which saves one import of everything (6 s of a core). TORCHDYNAMO_DISABLE=1 saves the C++ compilation of one
    function of the sampler, 16 s at the first token. One thread, because workers and trainer ranks share the cores.
    """
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # In one turn of the event loop, all requests that end in a chunk of outputs are answered, and others follow. A
        # publish waits for four such turns: 6.7 ms (p99) with 256 requests at vLLM's 128 outputs per chunk, 2.2 at 16.
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "16",
    }
    if device is Device.cuda:
        return common | {
            # torch.cuda.is_available(), which imports of vLLM call, asks the driver's management library. Otherwise it
            # opens the GPU, and no process that is forked later could use it (fork_server.py).
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # PyTorch's own softmax computes the sampled log-probabilities, and flashinfer need not be installed.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # DeepGEMM would requantize block-FP8 weights to scales that are powers of two, after loading.
            "VLLM_USE_DEEP_GEMM": "0",
            # Triton's own default. An engine that compiles its model sets another one, in that model's folder, and one
            # that finds its model compiled does not: it would compile kernels of experts and of the sampler again.
            "TRITON_CACHE_DIR": str(Path(os.environ.get("TRITON_HOME", Path.home()), ".triton", "cache")),
            # An engine that finds its model compiled loads the compiled parts alone, and does not split the graph again
            # for them: 0.4 s instead of 10.6 for Qwen3-30B-A3B. vLLM's own default from PyTorch 2.12 on.
            "VLLM_USE_MEGA_AOT_ARTIFACT": "1",
            # vLLM would thaw the imports, which are frozen, and collect among them several times while it captures.
            "VLLM_ENABLE_CUDAGRAPH_GC": "1",
        }
    return common | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def set_engine_environment(
    device: Device, *, batch_invariant: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set engine_environment() in this process, which has or forks an engine, or in another's environment."""
    for name, value in engine_environment(device).items():
        environment.setdefault(name, value)
    if batch_invariant:
        environment[BATCH_INVARIANT_VARIABLE] = "1"  # an option of the run, whatever was set before


def engine_arguments(options: EngineOptions, seed: int) -> JsonObject:
    """Arguments of vLLM's AsyncEngineArgs. The same names hold for both supported releases."""
    folder, config, adapters = options.folder, options.config, options.adapters
    is_cpu = options.device is not Device.cuda
    arguments: JsonObject = {
        "model": str(folder),
        "load_format": "dummy",  # a publish brings version 0, as every other version
        "skip_tokenizer_init": not config.sampling.stop,  # token ids in, token ids out; stop texts need text
        "tokenizer": str(folder) if config.sampling.stop else None,
        "generation_config": "vllm",  # ignore the checkpoint's sampling defaults
        "dtype": str(options.dtype),
        "seed": seed % (1 << 32),  # vLLM also seeds numpy, which takes no more
        "tensor_parallel_size": config.tp_size,
        "enable_expert_parallel": config.enable_expert_parallel,
        # Without this, vLLM would choose Ray inside a Ray placement group.
        "distributed_executor_backend": "mp" if config.tp_size > 1 else "uni",
        "max_model_len": config.max_model_len,
        "max_num_seqs": min(config.max_num_seqs or NUM_SEQS, config.max_num_batched_tokens),
        "max_num_batched_tokens": config.max_num_batched_tokens,  # vLLM's own default for embedded engines is 2,048
        "gpu_memory_utilization": config.gpu_memory_utilization / config.workers_per_gpu,
        "kv_cache_memory_bytes": config.kv_cache_bytes or (CPU_KV_CACHE_BYTES if is_cpu else None),
        "enforce_eager": is_cpu or config.enforce_eager,
        "enable_prefix_caching": True,  # siblings share their prompt
        # Of the distribution that is sampled from: after temperature, penalties and truncation (docs/parity.md).
        "logprobs_mode": "processed_logprobs",
        # The Triton kernels read weights and block scales in checkpoint order; others reorder, swizzle or requantize
        # them after loading. (post_load.py checks which kernels vLLM chose.)
        "moe_backend": "auto" if is_cpu else "triton",
        "linear_backend": "auto" if is_cpu else "triton",
        "worker_extension_cls": "slipstream.rollout.in_vllm.engine_process.WeightReceiver",
        "disable_log_stats": True,
    }
    if not arguments["enforce_eager"]:
        # vLLM by itself captures no graph for more than 512 requests; 768 then decode at 40 % of the speed of 512.
        arguments["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(arguments["max_num_seqs"])}
    if is_cpu and _has_latent_attention(folder):
        # With the AMX kernels vLLM would move kv_b_proj into private packed copies, and its own rotation for CPUs turns
        # latent heads wrongly (0.32).
        arguments["attention_backend"] = "CPU_MLA"
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    arguments |= _of_family(_config_of(folder), options.device)
    if options.batch_invariant:
        # torch.compile would make other kernels of norms and activations than those that the trainer calls; CUDA graphs
        # replay the same ones.
        arguments["attention_backend"] = "FLASH_ATTN_MLA" if _has_latent_attention(folder) else "FLASH_ATTN"
        without_compile = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        arguments["compilation_config"] = arguments.get("compilation_config", {}) | without_compile
    if options.routing is not None:
        # 0.25.1 keeps a byte (two with more than 256 experts) per layer and chosen expert for each token of the KV
        # cache, in the host memory of the engine's process.
        arguments["enable_return_routed_experts"] = True
    if adapters is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": adapters.num_slots,
            "max_cpu_loras": adapters.num_slots,
            "max_lora_rank": adapters.rank,
            "lora_target_modules": list(adapters.target_modules),
            "fully_sharded_loras": False,  # has no form with expert parallelism
        }
        if not arguments["enforce_eager"]:
            # Every request has an adapter. vLLM would capture each CUDA graph once more without.
            arguments["compilation_config"] |= {"cudagraph_specialize_lora": False}
        if adapters.base is not None:
            # vLLM chooses the form of the base. Of its kernels for INT4 experts, only Marlin's add adapters.
            arguments |= _loaded_from(adapters.base)
            arguments["moe_backend"] = "auto" if is_cpu else "marlin"
        if config.enable_expert_parallel:
            arguments["all2all_backend"] = "allgather_reducescatter"  # the only one that works with adapters of experts
    given = dict(config.engine_options)
    if "compilation_config" in given:
        given["compilation_config"] = arguments.get("compilation_config", {}) | given["compilation_config"]
    return arguments | given


def _of_family(hf_config: JsonObject, device: Device) -> JsonObject:
    """Arguments that one model needs and another does not."""
    family = family_of(hf_config)
    arguments: JsonObject = {} if family.other_attention is None else {**family.other_attention.arguments}
    if (engine_fields := family.engine_fields) is not None:
        arguments["hf_overrides"] = engine_fields(hf_config)
        if device is Device.cuda and not all(map(find_spec, FLASH_ATTENTION_4)):
            # 0.25.1 takes it for heads that differ from layer to layer, without a look at whether these are installed.
            arguments["attention_backend"] = "TRITON_ATTN"
    return arguments


def _loaded_from(base: Path) -> JsonObject:
    """Arguments with which vLLM reads weights from this folder: all that its config.json describes, or the language
    model without the tower beside it, for whose wrapper vLLM may have no slots (Kimi-K2.5)."""
    config = _config_of(base)
    if of_language_model(config) is config:
        return {"model": str(base), "load_format": "auto"}
    return {"load_format": LANGUAGE_MODEL, "model_loader_extra_config": {"folder": str(base)}}


def known_arguments() -> set[str] | None:
    """Names of arguments of the installed vLLM, from its source: an import takes seconds. None: there is no source."""
    found = find_spec("vllm")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        path = Path(folder, "engine", "arg_utils.py")
        if path.is_file():
            top = ast.parse(path.read_text(encoding="utf-8")).body
            classes = [node for node in top if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
            targets = [item.target for node in classes for item in node.body if isinstance(item, ast.AnnAssign)]
            return {target.id for target in targets if isinstance(target, ast.Name)}
    return None


def cache_bytes(
    config: RolloutConfig, tensors: Iterable[TensorMeta], adapters: AdapterSlotsSpec | None, gpu_bytes: int
) -> int:
    """Bytes of the KV cache of an engine that shares its GPU with others (rollout.workers_per_gpu): an equal part of
    what all may take, without weights and what else an engine needs. vLLM gives a cache what it finds free after a
    trial run, and would count what the neighbours take meanwhile as its own. Raises EngineError if nothing is left.
    """
    part = int(gpu_bytes * config.gpu_memory_utilization / config.workers_per_gpu)
    weights = _bytes_of(tensors) + (0 if adapters is None else adapters.num_slots * _bytes_of(adapters.tensors))
    if part <= weights + OTHER_BYTES:
        raise EngineError(
            f"rollout.workers_per_gpu={config.workers_per_gpu} leaves no engine a KV cache: of {gpu_bytes / 1e9:.1f} GB"
            f" and rollout.gpu_memory_utilization={config.gpu_memory_utilization:g}, each gets {part / 1e9:.1f} GB, and"
            f" weights take {weights / 1e9:.1f} and the rest of an engine {OTHER_BYTES / 1e9:.1f}; lower "
            "rollout.workers_per_gpu, or set rollout.kv_cache_bytes"
        )
    return part - weights - OTHER_BYTES


def _bytes_of(tensors: Iterable[TensorMeta]) -> int:
    return sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors)


def capture_sizes(num_seqs: int) -> list[int]:
    """Batch sizes for which an engine captures CUDA graphs: a smaller batch is padded to the next of them. Up to that
    many requests, in steps of at most a third, and of 64 from 256 on: about half as many as vLLM's own sizes, and as
    much less time to capture them."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 32), *range(256, num_seqs, 64)]
    return [*(size for size in sizes if size < num_seqs), num_seqs]


def warm_up_lengths(captured: int, largest: int) -> list[int]:
    """Prompt lengths that make Triton compile every kernel a batch may need, from `captured`, the largest one with a
    CUDA graph, to `largest`. vLLM's tuned MoE kernels change at sizes between these lengths (halfway between powers of
    two and the sizes in the middle of those). Every second one is odd because Triton compiles another kernel for counts
    that are not multiples of 16."""
    bases = [size for power in range(4, 31) for size in (1 << power, 3 << (power - 1))]
    inside = [base for base in bases if captured < base < largest]
    bases = [captured + 16, *inside, largest - 1]
    return sorted({length for base in bases for length in (base, base + 1) if captured < length <= largest})


def architectures_of(folder: Path) -> list[str]:
    return _config_of(folder).get("architectures") or []


def _has_latent_attention(folder: Path) -> bool:
    """Whether the model in this folder keeps keys and values as latents (MLA)."""
    return _config_of(folder).get("kv_lora_rank") is not None


def _config_of(folder: Path) -> JsonObject:
    file = folder / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}
