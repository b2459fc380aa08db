"""vLLM alone as a row of bench/loop.py, with the options of a run's engines.

For each number of requests at once: waves of so many requests. Responses of several lengths are measured at the largest
number alone, in waves of WAVES times as many, so that the next request takes the place of an ended one. Its KV cache is
what vLLM finds free, also where other rows share the GPU.
"""

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.loops.lengths import FIXED, lengths
from bench.loops.row_process import Job, answer

WAVES = 4


def run(job: Job) -> dict[str, Any]:
    """Start the engine, and sample."""
    from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
    from slipstream.rollout.engine.engine_options import engine_arguments, engine_environment
    from slipstream.rollout.types import EngineOptions

    device = Device(job.device)
    for name, value in engine_environment(device).items():
        os.environ.setdefault(name, value)
    config = RolloutConfig(
        max_model_len=job.max_model_len,
        max_num_seqs=max(job.concurrency),
        max_num_batched_tokens=max(8192, *job.concurrency),
        sampling=SamplingConfig(max_tokens=job.length, stop_at_eos=False),
        kv_cache_bytes=job.kv_cache_bytes,
        gpu_memory_utilization=job.gpu_memory_utilization,
    )
    dtype = DType.bfloat16 if device is Device.cuda else DType.float32
    arguments = engine_arguments(
        EngineOptions(folder=Path(job.model), config=config, dtype=dtype, device=device), seed=0
    )
    del arguments["worker_extension_cls"]
    started = time.monotonic()
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments)
    up_s = time.monotonic() - started

    def sample(num: int, of_each: Iterator[int]) -> float:
        """Tokens/s of so many requests, given to the engine at once."""
        began = time.perf_counter()
        prompts: list[Any] = [
            {"prompt_token_ids": [1 + (request + place) % 60 for place in range(job.prompt_tokens)]}
            for request in range(num)
        ]
        own = [SamplingParams(max_tokens=next(of_each), ignore_eos=True) for _ in prompts]
        outputs = engine.generate(prompts, own, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - began)

    sample(max(job.concurrency), lengths(FIXED, 8))
    of_each = lengths(job.lengths, job.length)
    num_requests = {num: num for num in job.concurrency}
    if job.lengths != FIXED:
        num_requests = {max(job.concurrency): WAVES * max(job.concurrency)}
    rates = {at_once: [sample(num, of_each) for _ in range(job.steps)] for at_once, num in num_requests.items()}
    medians = {at_once: statistics.median(own) for at_once, own in rates.items()}
    return {"up_s": up_s, "engine_tokens_per_s": medians, "all": rates}


if __name__ == "__main__":
    answer(run)
