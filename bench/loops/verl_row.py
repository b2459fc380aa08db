"""verl as two rows of bench/loop.py, with FSDP, PEFT and vLLM: its colocated synchronous trainer, and fully_async.

    python3 -m pip install --no-deps --target SITE verl==0.9.1 transformers==5.10.4 tokenizers==0.22.2 \\
        tensordict==0.10.0 TransferQueue==0.1.11 torchdata==0.11.0 codetiming==1.4.0 pylatexenc==2.11 \\
        pyvers==0.1.0 orjson==3.13.0 importlib_metadata==10.2.0 lazy_importer==0.1.0
    python bench/loop.py --rows verl verl-async --verl SITE

SITE comes before all other packages, because verl 0.9.1 takes transformers below 5.11. TRL must not be importable:
verl takes a class from it that TRL 1.16 does not have any more. Colocated, verl shards the model
over all GPUs of the job and has an engine on each, which sleeps while it trains. fully_async has its trainer on one GPU
and its engine on the other; it samples as many batches ahead as our run's staleness lets ours. Trainers take FSDP1,
verl's default: verl's FSDP2 shards the output layer by itself, and its fused loss then reads a shard. With experts they
take FSDP2 without the fused loss: PEFT reads the factors of experts without calling their modules, and FSDP1 then
leaves them sharded.

verl packs sequences only with flash-attn, which has no wheel for this torch: these rows train padded batches with sdpa.
verl casts adapters to bfloat16, and so are the moments. The ratio is taken to the engine's log-probabilities
(bypass_mode), which saves a forward pass. verl reads weights from a folder, so they are drawn on the device and written
there first. Steps are timed by when verl writes their metrics.
"""

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

from bench.loops.reward import is_even
from bench.loops.row_process import Job, answer
from bench.loops.trl_row import EXPERTS, drawn_model, tokenizer_of
from slipstream.orchestrator.files.row_files import read_rows

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PARTS = {
    "waits for the batch": ("timing_s/gen",),
    "forward and backward": ("timing_s/update_actor",),
    "publish": ("timing_s/update_weights", "timing_s/timing_s/param_sync", "timing_s/param_sync"),
}
"""Each part of a step: the first of these metrics that there is. The optimizer's seconds are in the second part."""

PEAKS = ("actor/perf/max_memory_reserved_gb", "perf/max_memory_reserved_gb")
"""GiB that the trainer's process has reserved at most, likewise."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward, as verl calls it."""
    return is_even(data_source, solution_str, {})


def options_of(job: Job, data: Path, *, has_experts: bool) -> list[str]:
    """The words after the module of the trainer (see `run`)."""
    actor, rollout, model = (f"actor_rollout_ref.{section}" for section in ("actor", "rollout", "model"))
    return [
        "algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=true",
        f"data.train_files={data}", f"data.val_files={data}",
        f"data.max_prompt_length={job.prompt_tokens}", f"data.max_response_length={job.length}",
        "data.dataloader_num_workers=0",
        f"{model}.path={job.model}", f"{model}.lora_rank={job.rank}", f"{model}.lora_alpha={2 * job.rank}",
        f"{model}.target_modules=all-linear", f"{model}.lora.merge=true", f"{model}.use_remove_padding=false",
        f"{model}.use_fused_kernels={not has_experts}", f"+{model}.override_config.attn_implementation=sdpa",
        f"{actor}.strategy={'fsdp2' if has_experts else 'fsdp'}",
        f"{actor}.fsdp_config.model_dtype=bf16", f"{actor}.optim.lr={job.lr}",
        f"{actor}.ppo_mini_batch_size={job.responses // job.group}", f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={job.microbatch_tokens}", f"{actor}.clip_ratio_high=0.28",
        f"{rollout}.name=vllm", f"{rollout}.n={job.group}", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.ignore_eos=true", f"{rollout}.max_model_len={job.max_model_len}",
        f"{rollout}.log_prob_use_dynamic_bsz=true", f"{rollout}.agent.num_workers=4", "reward.num_workers=2",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}", f"trainer.device={job.device}",
        "trainer.logger=[console,file]", "trainer.val_before_train=false", "trainer.resume_mode=disable",
        "ray_kwargs.ray_init.num_cpus=64", f"+ray_kwargs.ray_init.object_store_memory={4 << 30}",
        "+ray_kwargs.ray_init.include_dashboard=false", "+ray_kwargs.ray_init.address=local",
        *([f"+{model}.target_parameters=[{','.join(EXPERTS)}]"] if has_experts else []),
        *(_options_of_async(job) if job.is_async else _options_of_colocated(job)),
    ]  # fmt: skip


def _options_of_colocated(job: Job) -> list[str]:
    """Trainer and engines take turns at all GPUs."""
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_batch_size={job.responses // job.group}", f"trainer.total_training_steps={job.steps}",
        f"trainer.n_gpus_per_node={job.num_gpus}", f"{rollout}.max_num_seqs={job.responses}",
        f"{rollout}.gpu_memory_utilization=0.4",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={job.kv_cache_bytes}",
    ]  # fmt: skip


def _options_of_async(job: Job) -> list[str]:
    """A trainer on one GPU and an engine on another, which samples job.staleness batches ahead."""
    rollout, groups, batches = "actor_rollout_ref.rollout", job.responses // job.group, job.staleness + 1
    return [
        "data.train_batch_size=0", "data.gen_batch_size=1", "actor_rollout_ref.hybrid_engine=false",
        "trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=1", f"rollout.total_rollout_steps={job.steps * groups}",
        f"async_training.staleness_threshold={job.staleness}", "async_training.trigger_parameter_sync_step=1",
        f"async_training.concurrent_samples_per_replica={batches * groups}",
        f"{rollout}.max_num_seqs={batches * job.responses}", f"{rollout}.gpu_memory_utilization=0.9",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={batches * (job.kv_cache_bytes or 0)}",
    ]  # fmt: skip


def figures(rows: Sequence[tuple[float, Mapping[str, Any]]], job: Job) -> dict[str, Any]:
    """What verl's metrics of the steps after the warm-up say, in the words of bench/loop.py.

    Args:
        rows: Of each step, when its metrics were written, and they.
    """
    ends = [at for at, _ in rows]
    steps = [row for _, row in rows][job.warm_up :]
    step_s = [end - begin for begin, end in zip(ends[job.warm_up - 1 :], ends[job.warm_up :], strict=False)]
    seconds = sum(step_s)
    tokens = sum(step["response_length/mean"] * job.responses for step in steps)
    parts = {name: sum(_first(step, keys) for step in steps) / seconds for name, keys in PARTS.items()}
    sampling = sum(_first(step, PARTS["waits for the batch"]) for step in steps)
    k3 = [step[key] for step in steps for key in ("rollout_corr/k3_kl", "actor/rollout_corr/k3_kl") if key in step]
    return {
        "steps": len(steps),
        "step_s": statistics.median(step_s),
        "trained_tokens_per_s": tokens / seconds,
        # An asynchronous engine samples meanwhile: at least what is trained, and verl does not say how much more.
        "engine_tokens_per_s": None if job.is_async else tokens / sampling,
        "parts": parts | {"optimizer": 0.0, "rest": max(0.0, 1.0 - sum(parts.values()))},
        "publish_s": statistics.median(_first(step, PARTS["publish"]) for step in steps),
        "pause_s": statistics.median(
            _first(step, PARTS["publish"]) if job.is_async else own_s - _first(step, PARTS["waits for the batch"])
            for own_s, step in zip(step_s, steps, strict=True)
        ),
        "k3": statistics.median(k3) if k3 else None,
        "trainer_peak_gb": max(_first(step, PEAKS) for step in steps) * 1.073741824,
        "metrics": {key: value for key, value in sorted(steps[-1].items()) if isinstance(value, int | float)},
    }


def _first(step: Mapping[str, Any], keys: Sequence[str]) -> float:
    """The first of these metrics that a step has; 0 if it has none."""
    return next((step[key] for key in keys if key in step), 0.0)


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

    versions = {name: version(name) for name in ("verl", "transformers", "peft", "tensordict")}
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
    trainer = "experimental.fully_async_policy.fully_async_main" if job.is_async else "trainer.main_ppo"
    command = [sys.executable, "-m", f"verl.{trainer}", *options_of(job, data, has_experts="num_experts" in config)]
    process = subprocess.Popen(command, env=os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics)}, cwd=folder)
    steps: list[tuple[float, dict[str, Any]]] = []
    end_at = time.monotonic() + job.peer_seconds
    while process.poll() is None and time.monotonic() < end_at:
        found = [row["data"] for row in read_rows(metrics) if "response_length/mean" in row["data"]]
        steps += [(time.monotonic(), step) for step in found[len(steps) :]]
        time.sleep(0.1)
    process.terminate()  # does nothing where it has ended
    process.wait()
    if len(steps) <= job.warm_up:
        raise RuntimeError(f"verl ended with exit code {process.returncode} after {len(steps)} steps")
    return {**figures(steps, job), "first_step_at": steps[0][0], "versions": versions}


if __name__ == "__main__":
    answer(run)
