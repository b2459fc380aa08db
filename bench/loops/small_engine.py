"""One engine of bench/small_model.py, which starts several of these on one GPU and has them sample at the same time.

    python -m bench.loops.small_engine '{"way": "ours", "model": FOLDER, "most": 512, "length": 128, ...}'

bare: vLLM's LLM.generate with the arguments of a run's engines, and the job's on top. ours: rollout/engine/engine.py, a
group a call. Both have dummy weights. Says when it is up; then reads an order a line, and answers each: how many
requests, whether with log-probabilities (ours always), how many waves of them one after the other.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from bench.loops.row_process import RESULT

PROMPT_TOKENS = 48
GROUP = 16
Sample = Callable[[int, bool], Awaitable[int]]
"""Samples so many requests, with log-probabilities or without, and returns how many tokens."""


def tell(figures: dict[str, Any]) -> None:
    """Answer the parent."""
    print(RESULT + json.dumps(figures), flush=True)


def prompt_of(request: int) -> list[int]:
    """Siblings of a group share their prompt."""
    return [1 + (31 * (request // GROUP) + place) % 900 for place in range(PROMPT_TOKENS)]


async def bare(job: dict[str, Any]) -> Sample:
    """vLLM alone."""
    arguments = arguments_of(job) | job["arguments"]
    del arguments["worker_extension_cls"]
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments)

    async def sample(num: int, has_logprobs: bool) -> int:
        params = SamplingParams(
            max_tokens=job["length"], ignore_eos=True, detokenize=False, logprobs=0 if has_logprobs else None
        )
        prompts: list[Any] = [{"prompt_token_ids": prompt_of(request)} for request in range(num)]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return sample


async def ours(job: dict[str, Any]) -> Sample:
    """The engine of a rollout worker."""
    from slipstream.conf.schema import SamplingConfig
    from slipstream.rollout.engine.vllm_engine import VllmEngine

    device, dtype = device_of(job)
    engine = VllmEngine(Path(job["model"]), config_of(job), dtype=dtype, device=device, seed=os.getpid())
    await engine.start()
    engine.version = 0
    sampling = SamplingConfig(max_tokens=job["length"], stop_at_eos=False)

    async def sample(num: int, has_logprobs: bool) -> int:
        groups = [engine.generate_group(prompt_of(first), GROUP, sampling) for first in range(0, num, GROUP)]
        return sum(len(rollout.token_ids) for group in await asyncio.gather(*groups) for rollout in group)

    return sample


def device_of(job: dict[str, Any]) -> tuple[Any, Any]:
    """Device and format of the weights."""
    from slipstream.conf.schema import Device, DType

    device = Device(job["device"])
    return device, DType.bfloat16 if device is Device.cuda else DType.float32


def config_of(job: dict[str, Any]) -> Any:
    """Section `rollout` of the engine."""
    from slipstream.conf.schema import RolloutConfig, SamplingConfig

    return RolloutConfig(
        max_model_len=512,
        max_num_seqs=job["most"],
        sampling=SamplingConfig(max_tokens=job["length"], stop_at_eos=False),
        kv_cache_bytes=job["kv_cache_bytes"],
        gpu_memory_utilization=0.05,  # what must be free at the start; the cache has a size of its own
    )


def arguments_of(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments, as a run's engines get them."""
    from slipstream.rollout.engine.engine_options import engine_arguments, set_engine_environment

    device, dtype = device_of(job)
    set_engine_environment(device, batch_invariant=False)
    return engine_arguments(Path(job["model"]), config_of(job), dtype=dtype, device=device, seed=os.getpid())


async def serve(job: dict[str, Any]) -> None:
    """Start the engine, and follow orders until there are no more."""
    began = time.monotonic()
    sample = await {"bare": bare, "ours": ours}[job["way"]](job)
    await sample(min(job["most"], 2 * GROUP), False)
    cores = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    tell({"up_s": time.monotonic() - began, "core_pids": [core.pid for core in cores], "pid": os.getpid()})
    here = psutil.Process()
    while order := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(order)
        before = [sum(process.cpu_times()[:2]) for process in (here, *cores)]
        started = time.time()
        tokens = 0
        for _ in range(asked["waves"]):
            tokens += await sample(asked["requests"], asked["logprobs"])
        ended = time.time()
        spent = [sum(process.cpu_times()[:2]) for process in (here, *cores)]
        shares = [(after - first) / (ended - started) for first, after in zip(before, spent, strict=True)]
        tell({
            "tokens": tokens, "began": started, "ended": ended, "front_cores": shares[0], "core_cores": sum(shares[1:]),
        })  # fmt: skip


if __name__ == "__main__":
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    asyncio.run(serve(json.loads(sys.argv[1])))
    os._exit(0)  # vLLM's processes end with this one
