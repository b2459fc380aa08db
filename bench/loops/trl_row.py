"""TRL as a row of bench/loop.py: GRPOTrainer with PEFT adapters and vLLM, around a model that is drawn on the device.

    python3 -m pip install --no-deps --target SITE trl==1.16.0       beside vLLM 0.22 to 0.31, accelerate, datasets

Colocated, vLLM lives in this process and keeps its memory beside the trainer's, or sleeps while the trainer works. As a
server vLLM has a process and a GPU of its own. TRL corrects by the ratio of trainer and engine, as a Slipstream run
does; it spends a forward pass of its own on that. So Job.steps are trained with the correction, and then as many, but
for the warm-up, without it; their figures are kept apart.

What differs from a user's script: weights are random, so vLLM is told load_format=dummy and gets them by TRL's first
sync, and a colocated vLLM's KV cache has the size that the other rows' has. On a CPU vLLM packs the weights of linears
after loading, so TRL's sync ends with an AttributeError there.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.loops.reward import is_even
from bench.loops.row_process import Job, answer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PORT = 8017


class Clock:
    """When steps ended, and the seconds of syncs and of sampling between two of them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.ends: list[float] = []
        self.parts: dict[str, list[float]] = {"sync": [], "generate": []}
        self._seconds = dict.fromkeys(self.parts, 0.0)

    def timed(self, part: str, call: Callable[..., Any], synchronize: Callable[[], None]) -> Callable[..., Any]:
        """`call`, with its seconds added to that part of the step."""

        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            synchronize()
            began = self.now()
            inside = sum(self._seconds.values())
            result = call(*arguments, **named)
            synchronize()
            # A sync inside of a generation counts once.
            self._seconds[part] += self.now() - began - (sum(self._seconds.values()) - inside)
            return result

        return timed

    def step_ended(self) -> None:
        self.ends.append(self.now())
        for part, seconds in self._seconds.items():
            self.parts[part].append(seconds)
            self._seconds[part] = 0.0


def figures(clock: Clock, tokens: list[int], k3: list[float], first: int, last: int) -> dict[str, Any]:
    """What steps first to last - 1 (counted from 0; first is at least 1) say, in the words of bench/loop.py."""
    steps = range(first, last)
    seconds = clock.ends[last - 1] - clock.ends[first - 1]
    parts = {name: sum(clock.parts[name][step] for step in steps) for name in clock.parts}
    trained = sum(tokens[step] for step in steps)
    rest = seconds - sum(parts.values())
    return {
        "steps": len(steps),
        "step_s": statistics.median(clock.ends[step] - clock.ends[step - 1] for step in steps),
        "trained_tokens_per_s": trained / seconds,
        "engine_tokens_per_s": trained / parts["generate"] if parts["generate"] else None,
        "parts": {
            "waits for the batch": parts["generate"] / seconds,
            "forward and backward": rest / seconds,  # the optimizer's step among them
            "optimizer": 0.0,
            "publish": parts["sync"] / seconds,
            "rest": 0.0,
        },
        "publish_s": statistics.median(clock.parts["sync"][step] for step in steps),
        "pause_s": statistics.median(
            clock.ends[step] - clock.ends[step - 1] - clock.parts["generate"][step] for step in steps
        ),
        "k3": statistics.median(k3[first:last]) if k3[first:last] else None,
    }


def tokenizer_of(folder: Path, vocab_size: int) -> Any:
    """One word per token id ("t0", "t1", ...), saved beside config.json. The last two are a new line and Qwen's end of
    a turn, which verl looks for.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*(f"t{token}" for token in range(vocab_size - 2)), "\n", "<|im_end|>"]
    made_of = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="t0"))
    made_of.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    made = PreTrainedTokenizerFast(tokenizer_object=made_of, unk_token="t0", eos_token="t0", pad_token="t0")
    made.padding_side = "left"
    made.save_pretrained(folder)
    return made


def drawn_model(job: Job) -> Any:
    """transformers' model, drawn on the device by its own initialization."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job.model)
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if hasattr(config, "num_experts"):
        model.set_experts_implementation("grouped_mm")
    return model


def adapters_of(model: Any, rank: int) -> Any:
    """LoRA on every linear of the layers, and on gate, up and down of all experts."""
    from peft import LoraConfig

    has_experts = hasattr(model.config, "num_experts")
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=LINEARS[:4] if has_experts else LINEARS,
        target_parameters=EXPERTS if has_experts else None,
        task_type="CAUSAL_LM",
    )


def options_of(job: Job, folder: str) -> Any:
    """GRPOConfig: a generation per optimizer step, microbatches of as many tokens as in the other rows."""
    from trl import GRPOConfig

    sequences = max(1, job.microbatch_tokens // (job.prompt_tokens + job.length))
    at_once = max(num for num in range(1, job.responses + 1) if job.responses % num == 0 and num <= sequences)
    return GRPOConfig(
        output_dir=folder,
        max_steps=2 * job.steps - job.warm_up,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=job.responses // at_once,
        num_generations=job.group,
        max_completion_length=job.length,
        generation_kwargs={"ignore_eos": True},
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        router_aux_loss_coef=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        bf16=job.device == "cuda",
        use_cpu=job.device == "cpu",
        gradient_checkpointing=True,
        optim="adamw_torch_fused",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="server" if job.has_server else "colocate",
        vllm_server_base_url=f"http://127.0.0.1:{PORT}",
        vllm_max_model_length=job.max_model_len,
        vllm_enable_sleep_mode=job.sleeps,
    )


@contextmanager
def server(job: Job) -> Iterator[None]:
    """`vllm serve` on the second GPU, if the job has one; TRL waits until it answers."""
    if not job.has_server:
        yield
        return
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", job.model, "--host", "127.0.0.1",
        "--port", str(PORT), "--load-format", "dummy", "--dtype", "bfloat16", "--weight-transfer-config",
        '{"backend":"nccl"}', "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
        "--max-model-len", str(job.max_model_len), "--max-num-seqs", str(job.responses),
    ]  # fmt: skip
    own = {"CUDA_VISIBLE_DEVICES": job.server_gpu, "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(command, env=os.environ | own)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def run(job: Job) -> dict[str, Any]:
    """The whole job.

    Raises:
        ImportError: TRL, or something that it needs, is not installed.
    """
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from trl.generation import vllm_generation

    is_gpu = job.device == "cuda"
    synchronize = torch.cuda.synchronize if is_gpu else lambda: None
    folder = Path(job.model)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = tokenizer_of(folder, vocab_size)
    vllm_generation.LLM = functools.partial(  # TRL has no options for these
        vllm_generation.LLM,
        load_format="dummy",
        dtype="bfloat16" if is_gpu else "float32",
        kv_cache_memory_bytes=job.kv_cache_bytes,
        enforce_eager=not is_gpu,
    )
    clock, tokens, k3 = Clock(), [], []
    end_at = time.monotonic() + job.peer_seconds

    class Measured(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            mask = batch["completion_mask"].bool()
            tokens.append(int(mask.sum()))
            if "old_per_token_logps" in batch:
                ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].float()
                k3.append(float((ratio.exp() - 1 - ratio).mean()))
            return batch

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            synchronize()
            clock.step_ended()
            print(f"trl: step {state.global_step} ended at {clock.ends[-1]:.1f}", flush=True)
            if state.global_step == job.steps:
                trainer.vllm_importance_sampling_correction = False
            control.should_training_stop |= state.global_step > job.warm_up and time.monotonic() > end_at

    def reward(prompts: Any, completions: Any, **others: Any) -> list[float]:
        return [is_even(prompt, completion, {}) for prompt, completion in zip(prompts, completions, strict=True)]

    prompts = [
        " ".join(f"t{1 + (row + place) % 60}" for place in range(job.prompt_tokens))
        for row in range(2 * job.steps * job.responses // job.group)
    ]
    model = drawn_model(job)
    with server(job):
        trainer = Measured(
            model=model,
            args=options_of(job, str(folder / "trl")),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            peft_config=adapters_of(model, job.rank),
            callbacks=[Steps()],
        )
        engine = trainer.vllm_generation
        engine.sync_weights = clock.timed("sync", engine.sync_weights, synchronize)
        engine.generate = clock.timed("generate", engine.generate, synchronize)
        trainer.train()
    trainable = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    made = len(clock.ends)
    return {
        **figures(clock, tokens, k3, job.warm_up, min(job.steps, made)),
        **({"uncorrected": figures(clock, tokens, [], job.steps, made)} if made > job.steps else {}),
        "first_step_at": clock.ends[0],
        "step_tokens": tokens,
        "trainer_peak_gb": torch.cuda.max_memory_reserved() / 1e9 if is_gpu else 0.0,
        "num_trainable": sum(parameter.numel() for parameter in trainable),
        "adapter_dtypes": sorted({str(parameter.dtype) for parameter in trainable}),
        "versions": {name: version(name) for name in ("trl", "transformers", "peft", "accelerate")},
        "microbatch": trainer.args.per_device_train_batch_size,
    }


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_NO_USAGE_STATS": "1"}
    answer(run)
