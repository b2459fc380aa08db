"""What vLLM's own loader makes of a checkpoint: the oracle of every comparison of engine bytes."""

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fakes.readable_engine import READER
from slipstream.rollout.die_with_owner import OWNER_VARIABLE
from slipstream.rollout.engine.engine_options import engine_arguments
from slipstream.rollout.in_vllm.process_imports import import_vllm
from slipstream.rollout.types import WorkerOptions

ONLY_THE_LIKELIEST = 1e-6
"""top_p that makes sampling greedy, for requests that must have a temperature."""


OF_THE_ENGINE = (
    "dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "enforce_eager", "max_loras", "max_lora_rank",
    "lora_target_modules", "enable_lora", "tensor_parallel_size", "enable_expert_parallel", "moe_backend",
    "gpu_memory_utilization", "distributed_executor_backend", "all2all_backend",
)  # fmt: skip
"""What an oracle beside a worker has from its engine's arguments."""


@contextmanager
def models_inspected_here() -> Iterator[None]:
    """vLLM asks a process of its own, which imports vLLM anew, what a class of model can do, lest CUDA be initialized
    too early, and keeps the answer in its cache. A CPU has no such worry."""
    from vllm.model_executor.models import registry

    if torch.cuda.is_available():
        yield
        return
    with mock.patch.object(registry, "_run_in_subprocess", lambda ask: ask()):
        yield


@contextmanager
def ranks_forked() -> Iterator[None]:
    """On a CPU the ranks of an engine are forked from this process, which has imported vLLM. vLLM's own way is to spawn
    each, and to import vLLM in it."""
    from vllm.v1.executor import multiproc_executor

    if torch.cuda.is_available():
        yield
        return
    os.environ.setdefault(OWNER_VARIABLE, str(os.getpid()))
    with mock.patch.object(multiproc_executor, "get_mp_context", partial(multiprocessing.get_context, "fork")):
        yield


@contextmanager
def imports_spared_by_collections() -> Iterator[None]:
    """vLLM collects garbage eight times in the life of an engine. Each time takes half a second of a core, for the
    million objects that its import has made. Those are spared in the block, and also later.
    """
    import_vllm()
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"):  # vLLM's own, which would undo it
        yield


@contextmanager
def engine_of(**arguments: Any) -> Iterator[Any]:
    """A vLLM engine of these arguments. It lies in this process, which imports vLLM once for all of them, but for the
    ranks of several."""
    ranks = ranks_forked() if arguments.get("tensor_parallel_size", 1) > 1 else nullcontext()
    with imports_spared_by_collections():
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        with mock.patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0"), models_inspected_here(), ranks:
            engine = LLM(**arguments)
        try:
            yield engine
        finally:
            engine.llm_engine.engine_core.shutdown()
            del engine
            cleanup_dist_env_and_memory()


def vllm_loads(folder: Path, dtype: str, **arguments: Any) -> dict[str, str]:
    """sha256 of every weight of a one-rank engine that loads the checkpoint by itself."""
    (hashes,), _ = vllm_loads_and_samples(folder, dtype, **arguments)
    return hashes


def vllm_loads_and_samples(
    folder: Path, dtype: str, *, prompts: Sequence[Sequence[int]] = (), max_tokens: int = 8, **arguments: Any
) -> tuple[list[dict[str, str]], list[list[int]]]:
    """The same of every rank, and what that engine samples greedily.

    Args:
        arguments: More of vLLM's engine arguments (tensor_parallel_size, ...).
    """
    import_vllm()
    from vllm import SamplingParams

    given = {"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20, **arguments}
    greedy = SamplingParams(temperature=1.0, top_p=ONLY_THE_LIKELIEST, max_tokens=max_tokens, ignore_eos=True)
    greedy.detokenize = False
    tokens: list[list[int]] = []
    with engine_of(
        model=str(folder), load_format="safetensors", skip_tokenizer_init=True, dtype=dtype, disable_log_stats=True,
        worker_extension_cls=READER, **given,
    ) as engine:  # fmt: skip
        replies = engine.collective_rpc("read_params")
        for error, text, _ in replies:
            assert not error, (error, text)
        for prompt in prompts:  # one at a time: sums of a batch may be rounded in another order
            asked: Any = [{"prompt_token_ids": list(prompt)}]
            (output,) = engine.generate(asked, greedy, use_tqdm=False)
            tokens.append(list(output.outputs[0].token_ids))
    return [hashes for _, _, hashes in replies], tokens


def vllm_serves_adapter(
    base: Path, adapter: Path, prompt: list[int], *, num_tokens: int, seed: int, options: WorkerOptions
) -> tuple[list[dict[str, str]], list[int], list[float]]:
    """An engine in this process that loads a base and an adapter from disk by itself, with a worker's options.

    Returns:
        By rank, sha256 of every buffer of the adapter's slot; and the tokens and log-probabilities of one response.
    """
    import_vllm()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    arguments = engine_arguments(options, seed=1)
    engine = LLM(
        model=str(base), load_format="safetensors", skip_tokenizer_init=True, disable_log_stats=True,
        worker_extension_cls=READER,
        logprobs_mode="processed_logprobs", **{name: arguments[name] for name in OF_THE_ENGINE if name in arguments},
    )  # fmt: skip
    params = SamplingParams(
        max_tokens=num_tokens, temperature=1.0, seed=seed, logprobs=0, ignore_eos=True, detokenize=False
    )
    (output,) = engine.generate(
        {"prompt_token_ids": prompt}, params, lora_request=LoRARequest("from disk", 1, str(adapter)), use_tqdm=False
    )
    replies = engine.collective_rpc("read_slots")
    assert not any(error for error, _, _ in replies), replies
    tokens = list(output.outputs[0].token_ids)
    first_slots = [slots[0] for _, _, slots in replies]
    return first_slots, tokens, [entry[t].logprob for t, entry in zip(tokens, output.outputs[0].logprobs, strict=True)]
