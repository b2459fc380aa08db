"""TRL as a row of bench/real_model.py: GRPOTrainer with PEFT adapters and colocated vLLM, and a row of figures a step.

    python -m bench.loops.trl_learner JOB      JOB: Job as JSON

The job is the user's: TRL's defaults, but for what the rows of Slipstream have, too (Job). Held-out prompts are sampled
once each by TRL's own engine, right after TRL gave it the version that they are to judge. On a CPU, where vLLM packs
weights so that TRL cannot give it others, transformers generates and nothing is held out.
"""

import functools
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
LINEARS = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is learned, and where its figures go."""

    model: str
    data: str
    """Folder with train.jsonl and heldout.jsonl."""
    rows: str
    """File to which a row of figures is added after each step."""
    adapters: str
    """Folder for the adapter at its end."""
    seed: int
    steps: int
    eval_every: int
    max_tokens: int
    groups: int = 16
    group_size: int = 16
    parts: int = 1
    """Forward and backward passes that a batch is divided into."""
    is_cpu: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of GRPOConfig."""


def options_of(job: Job) -> Any:
    from trl import GRPOConfig

    responses = job.groups * job.group_size
    given: dict[str, Any] = {
        "output_dir": job.adapters,
        "max_steps": job.steps,
        "per_device_train_batch_size": responses // job.parts,
        "gradient_accumulation_steps": job.parts,
        "num_generations": job.group_size,
        "max_completion_length": job.max_tokens,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "bf16": not job.is_cpu,
        "use_cpu": job.is_cpu,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_vllm": not job.is_cpu,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 512,
        "seed": job.seed,
    }
    return GRPOConfig(**given | job.options)


class Figures:
    """The rows: training figures of a step, and held-out ones of the version that it began with."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._row: dict[str, Any] = {}
        lines = (Path(job.data) / "heldout.jsonl").read_text().splitlines()
        self.held_out = [json.loads(line) for line in lines]

    def of_batch(self, batch: dict[str, Any], rewards: Any) -> None:
        """Note rewards and lengths of the responses that a step learns from."""
        mask = batch["completion_mask"].bool()
        lengths = mask.sum(1).float()
        self._row |= {
            "reward": float(rewards.mean()),
            "tokens": float(lengths.mean()),
            "truncated": float((lengths >= self._job.max_tokens).float().mean()),
        }
        if "old_per_token_logps" in batch and "sampling_per_token_logps" in batch:
            ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].float()
            self._row["k3"] = float((ratio.exp() - 1 - ratio).mean())
        if "importance_sampling_ratio" in batch:
            weights = batch["importance_sampling_ratio"].float()
            self._row |= {"weight": float(weights.mean()), "masked": float((weights == 0).float().mean())}

    def of_held_out(self, step: int, engine: Any, tokenizer: Any) -> None:
        """Sample the held-out prompts from TRL's engine, once each, as a step does, and write a row of them."""
        from vllm import SamplingParams

        from examples.real_model.reward import answer

        prompts = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            for row in self.held_out
        ]
        outputs = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            sampling_params=SamplingParams(temperature=1.0, max_tokens=self._job.max_tokens),
            use_tqdm=False,
        )
        rewards = [
            answer(row["prompt"], output.outputs[0].text, row)
            for row, output in zip(self.held_out, outputs, strict=True)
        ]
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        self.write(step, {"held_out": sum(rewards) / len(rewards), "held_out_tokens": sum(lengths) / len(lengths)})

    def step_ended(self, step: int) -> None:
        row, self._row = self._row, {}
        self.write(step, row)

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Add a row, with the seconds since the process began."""
        with Path(self._job.rows).open("a") as file:
            file.write(json.dumps({"step": step, "s": round(time.monotonic() - BEGAN, 2), **row}) + "\n")


def run(job: Job) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer
    from trl.generation import vllm_generation

    from examples.real_model.reward import answer

    if not job.is_cpu:  # TRL has no option for it; without it, jobs beside each other would be measured by vLLM
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, kv_cache_memory_bytes=3 << 30)
    figures = Figures(job)

    class Measured(GRPOTrainer):
        def _calculate_rewards(self, *arguments: Any) -> Any:
            self.rewards = super()._calculate_rewards(*arguments)
            return self.rewards

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            figures.of_batch(batch, self.rewards)
            return batch

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            figures.step_ended(state.global_step)

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [
            answer(prompt, completion[0]["content"], {"answer": right})
            for prompt, completion, right in zip(prompts, completions, columns["answer"], strict=True)
        ]

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    dtype = torch.float32 if job.is_cpu else torch.bfloat16
    lines = (Path(job.data) / "train.jsonl").read_text().splitlines()
    trainer = Measured(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype),
        args=options_of(job),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules=LINEARS, task_type="CAUSAL_LM"),
        callbacks=[Steps()],
    )
    if not job.is_cpu:
        engine = trainer.vllm_generation
        sync = engine.sync_weights

        def sync_and_evaluate() -> None:
            sync()
            step = trainer.state.global_step
            if step % job.eval_every == 0 or step == job.steps:
                figures.of_held_out(step, engine.llm, tokenizer)

        engine.sync_weights = sync_and_evaluate
    trainer.train()
    if not job.is_cpu:
        engine.sync_weights()
    trainer.save_model(job.adapters)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_NO_USAGE_STATS": "1"}
    run(Job(**json.loads(sys.argv[1])))
