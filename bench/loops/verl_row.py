"""verl as a row of bench/loop.py: its colocated synchronous trainer (FSDP2, PEFT, vLLM asleep while it trains).

    python3 -m pip install --no-deps --target SITE verl==0.9.1 transformers==5.10.4 tokenizers==0.22.2 \\
        tensordict==0.10.0 TransferQueue==0.1.11 torchdata==0.11.0 codetiming==1.4.0 pylatexenc==2.11 \\
        pyvers==0.1.0 orjson==3.13.0 importlib_metadata==10.2.0
    python bench/loop.py --one-gpu --rows verl --verl SITE

SITE comes before all other packages, because verl 0.9.1 takes transformers below 5.11. verl packs sequences only with
flash-attn, which has no wheel for this torch: this row trains padded batches with sdpa. verl casts adapters to
bfloat16, and so are the moments. The ratio is taken to the engine's log-probabilities (bypass_mode), which saves a
forward pass. verl reads weights from a folder, so they are drawn on the device and written there first. verl gives all
requests of a job one max_tokens, so it has no long-tailed lengths.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.loops.lengths import FIXED
from bench.loops.reward import is_even
from bench.loops.row_process import Job, answer
from bench.loops.trl_row import drawn_model, tokenizer_of

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PARTS = {
    "waits for the batch": "timing_s/gen",
    "forward and backward": "timing_s/update_actor",
    "publish": "timing_s/update_weights",
}
"""The metric of each part of a step; the optimizer's is in the second."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward, as verl calls it."""
    return is_even(data_source, solution_str, {})


def options_of(job: Job, data: Path) -> list[str]:
    """The words after `verl.trainer.main_ppo`."""
    actor, rollout, model = (f"actor_rollout_ref.{section}" for section in ("actor", "rollout", "model"))
    groups = job.responses // job.group
    return [
        "algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=true",
        f"data.train_files={data}", f"data.val_files={data}", f"data.train_batch_size={groups}",
        f"data.max_prompt_length={job.prompt_tokens}", f"data.max_response_length={job.length}",
        "data.dataloader_num_workers=0",
        f"{model}.path={job.model}", f"{model}.lora_rank={job.rank}", f"{model}.lora_alpha={2 * job.rank}",
        f"{model}.target_modules=all-linear", f"{model}.lora.merge=true", f"{model}.use_remove_padding=false",
        f"{model}.use_fused_kernels=true", f"+{model}.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2", f"{actor}.fsdp_config.model_dtype=bf16", f"{actor}.optim.lr={job.lr}",
        f"{actor}.ppo_mini_batch_size={groups}", f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={job.microbatch_tokens}", f"{actor}.clip_ratio_high=0.28",
        f"{rollout}.name=vllm", f"{rollout}.n={job.group}", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.ignore_eos=true", f"{rollout}.max_model_len={job.max_model_len}",
        f"{rollout}.max_num_seqs={job.responses}", f"{rollout}.gpu_memory_utilization=0.4",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={job.kv_cache_bytes}",
        f"{rollout}.log_prob_use_dynamic_bsz=true", f"{rollout}.agent.num_workers=4", "reward.num_workers=2",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}", "trainer.n_gpus_per_node=1",
        f"trainer.device={job.device}", f"trainer.total_training_steps={job.steps}", "trainer.logger=[console,file]",
        "trainer.val_before_train=false", "trainer.resume_mode=disable", "ray_kwargs.ray_init.num_cpus=64",
        f"+ray_kwargs.ray_init.object_store_memory={4 << 30}", "+ray_kwargs.ray_init.include_dashboard=false",
        "+ray_kwargs.ray_init.address=local",
    ]  # fmt: skip


def figures(rows: Sequence[Mapping[str, Any]], job: Job) -> dict[str, Any]:
    """What verl's metrics of the steps after the warm-up say, in the words of bench/loop.py."""
    steps = [row["data"] for row in rows if row["step"] > job.warm_up]
    seconds = sum(step["timing_s/step"] for step in steps)
    tokens = sum(step["response_length/mean"] * job.responses for step in steps)
    parts = {name: sum(step.get(key, 0.0) for step in steps) / seconds for name, key in PARTS.items()}
    k3 = [step[key] for step in steps for key in ("rollout_corr/k3_kl", "actor/rollout_corr/k3_kl") if key in step]
    return {
        "steps": len(steps),
        "step_s": statistics.median(step["timing_s/step"] for step in steps),
        "trained_tokens_per_s": tokens / seconds,
        "engine_tokens_per_s": tokens / sum(step["timing_s/gen"] for step in steps),
        "parts": parts | {"optimizer": 0.0, "rest": max(0.0, 1.0 - sum(parts.values()))},
        "publish_s": statistics.median(step.get("timing_s/update_weights", 0.0) for step in steps),
        "pause_s": statistics.median(step["timing_s/step"] - step["timing_s/gen"] for step in steps),
        "k3": statistics.median(k3) if k3 else None,
        "trainer_peak_gb": max(step.get("perf/max_memory_reserved_gb", 0.0) for step in steps) * 1.073741824,
        "metrics": sorted(steps[-1]),
    }


def write_weights(job: Job) -> None:
    """Draw the model and write it beside its config.json. What it took of the GPU is free afterwards."""
    import torch

    drawn_model(job).save_pretrained(job.model, max_shard_size="4GB")
    if job.device == "cuda":
        torch.cuda.empty_cache()


def run(job: Job) -> dict[str, Any]:
    """The whole job, through verl's command.

    Raises:
        ImportError: verl, or something that it needs, is not installed.
    """
    import pandas

    versions = {name: version(name) for name in ("verl", "transformers", "peft", "vllm", "tensordict")}
    if job.lengths != FIXED:
        raise NotImplementedError("verl's requests have one max_tokens: no lengths of their own")
    folder = Path(job.model)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = tokenizer_of(folder, config["vocab_size"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    write_weights(job)
    data, metrics = folder / "verl.parquet", folder / "verl.jsonl"
    texts = [
        " ".join(f"t{1 + (row + place) % 60}" for place in range(job.prompt_tokens))
        for row in range(job.steps * job.responses // job.group)
    ]
    columns = {"prompt": [[{"role": "user", "content": text}] for text in texts]}
    columns |= {"data_source": ["bench"] * len(texts), "reward_model": [{"ground_truth": ""}] * len(texts)}
    pandas.DataFrame(columns).to_parquet(data)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *options_of(job, data)]
    process = subprocess.Popen(command, env=os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics)}, cwd=folder)
    first_step_at = None
    while process.poll() is None:
        if first_step_at is None and metrics.exists() and metrics.stat().st_size:
            first_step_at = time.monotonic()
        time.sleep(0.2)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if len(rows) <= job.warm_up:
        raise RuntimeError(f"verl ended with exit code {process.returncode} after {len(rows)} steps")
    return {**figures(rows, job), "first_step_at": first_step_at, "versions": versions}


if __name__ == "__main__":
    answer(run)
