"""Do trainer and engine agree bit by bit? Sample, compare, train, publish in place, again and again, on one GPU.

    python bench/bitwise.py --family qwen3_moe                 parity=bitwise: every log-ratio must be 0
    python bench/bitwise.py --weights adapter                  engines hold the base and adapters in slots
    python bench/bitwise.py --family qwen3 --mode default      the same run without it: k3, and the price in tokens/s

Needs a GPU. The engine runs in this process with the arguments that the product gives it; the trainer is the product's
decoder with LoRA. A publish copies what TrainerWeightSource gives into vLLM's parameters, or what AdapterSource gives
into a slot. Losses are random, so that
adapters change in every layer. Rounds take turns with 1, 7 and all prompts at once, of different lengths. Exits with 1
where parity=bitwise was asked for and a log-ratio is not 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.bitwise_slots import NUM_SLOTS, SlotsHere  # noqa: E402
from bench.environment import environment  # noqa: E402
from bench.shapes import add_shape_options, model_config  # noqa: E402
from bench.sync.engine_process import FUSIONS  # noqa: E402
from slipstream.conf.schema import (  # noqa: E402
    Device,
    DType,
    LoraConfig,
    Match,
    NumericsConfig,
    RolloutConfig,
    SamplingConfig,
    SyncMode,
    TrainerConfig,
)
from slipstream.rollout.engine.engine_options import (  # noqa: E402
    BATCH_INVARIANT_VARIABLE,
    engine_arguments,
    engine_environment,
)
from slipstream.rollout.types import AdapterSlotsSpec, EngineOptions  # noqa: E402

MICROBATCH_TOKENS = 8192


@dataclass(frozen=True)
class Response:
    """Tokens of a prompt, then those that were sampled, and the engine's log-probabilities of the latter."""

    tokens: list[int]
    num_prompt_tokens: int
    logprobs: list[float]


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    config = model_config(args)
    if args.family == "qwen3":
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        config = {name: value for name, value in config.items() if "expert" not in name and "moe" not in name}
    return config


def lora_of(args: argparse.Namespace) -> LoraConfig:
    return LoraConfig(rank=args.rank, alpha=2.0 * args.rank)


def slots_of(args: argparse.Namespace, dtype: DType) -> AdapterSlotsSpec | None:
    """Slots for the adapters; None: they are merged."""
    from slipstream.conf.architecture.families import read_config
    from slipstream.trainer.weights.adapter_names import adapter_tensors, target_modules

    if args.weights is SyncMode.merged:
        return None
    tensors, lora = read_config(config_of(args)).checkpoint_tensors(dtype.value), lora_of(args)
    targets = tuple(target_modules(tensors, lora))
    return AdapterSlotsSpec(NUM_SLOTS, lora.slot_rank, targets, tuple(adapter_tensors(tensors, lora)))


class EngineHere:
    """The engine, in this process."""

    def __init__(self, args: argparse.Namespace, folder: Path, device: Device) -> None:
        from vllm import LLM

        from slipstream.rollout.in_vllm.vllm_patches import keep_linear_weights_in_place

        (folder / "config.json").write_text(json.dumps(config_of(args)))
        is_gpu = device is Device.cuda
        dtype = DType.bfloat16 if is_gpu else DType.float32
        slots = slots_of(args, dtype)
        arguments = engine_arguments(
            EngineOptions(
                folder=folder,
                config=RolloutConfig(
                    max_model_len=args.max_model_len,
                    max_num_seqs=args.prompts,
                    max_num_batched_tokens=max(args.prompts, args.batched_tokens),
                    gpu_memory_utilization=0.1,
                    kv_cache_bytes=(4 << 30) if is_gpu else None,
                    enforce_eager=args.eager,
                    sampling=SamplingConfig(max_tokens=args.tokens),
                ),
                dtype=dtype,
                device=device,
                adapters=slots,
                batch_invariant=args.mode == "bitwise",
            ),
            seed=0,
        )
        if not is_gpu:
            keep_linear_weights_in_place()
        self.llm = LLM(**arguments)
        self.slots = None if slots is None else SlotsHere(self.llm, slots.tensors)

    def sample(
        self, prompts: list[list[int]], num_tokens: int, ends: tuple[int, ...] = ()
    ) -> tuple[list[Response], float]:
        """Sample one response to each; it stops after one of `ends`. Returns them and the seconds."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=1.0, max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False,
            stop_token_ids=list(ends),
        )  # fmt: skip
        began = time.perf_counter()
        outs = self._run(prompts, sampling)
        seconds = time.perf_counter() - began
        responses = []
        for prompt, out in zip(prompts, outs, strict=True):
            one = out.outputs[0]
            assert one.logprobs is not None
            sampled = zip(one.logprobs, one.token_ids, strict=True)
            logprobs = [at[token].logprob for at, token in sampled if at is not None]
            responses.append(Response([*prompt, *one.token_ids], len(prompt), logprobs))
        return responses, seconds

    def score(self, responses: list[Response]) -> list[list[float]]:
        """The engine's log-probabilities of the sampled tokens by one prefill of all tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        outs = self._run([one.tokens for one in responses], sampling)
        scores = []
        for one, out in zip(responses, outs, strict=True):
            assert out.prompt_logprobs is not None
            sampled = zip(out.prompt_logprobs, one.tokens, strict=True)
            scores.append([at[token].logprob for at, token in list(sampled)[one.num_prompt_tokens :] if at is not None])
        return scores

    def load(self, trainer: TrainerHere) -> None:
        """Take the trainer's newest version: weights with adapters in them, or the base once and then adapters."""
        if self.slots is None:
            self.llm.apply_model(lambda model: write_over(model, trainer.weights()))
            self.llm.reset_prefix_cache()
            return
        if trainer.version == 0:
            self.slots.load_base(lambda model: write_over(model, trainer.weights()))
        self.slots.publish(trainer.adapter_source)

    def _run(self, prompts: list[list[int]], sampling: Any) -> list[Any]:
        """One request to each, of the newest version; its name keeps requests from prefix blocks of others."""
        salt = {} if self.slots is None else {"cache_salt": self.slots.adapter.name}
        asked: list[Any] = [{"prompt_token_ids": prompt, **salt} for prompt in prompts]
        lora = None if self.slots is None else self.slots.request()
        return self.llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)


def write_over(model: Any, weights: Iterator[tuple[str, Any]]) -> None:
    """Put checkpoint tensors where vLLM's Qwen3 models have them on a GPU: parts of a fused parameter lie one below the
    other, in the order of the checkpoint."""
    parameters = {name.replace("routed_experts.", ""): parameter.data for name, parameter in model.named_parameters()}
    written = dict.fromkeys(parameters, 0)
    for tensor, values in weights:
        name = tensor
        for pattern, fused in FUSIONS:
            name = re.sub(f"^{pattern}$", fused, name)
        rows = parameters[name].flatten(0, 1) if parameters[name].dim() == 3 else parameters[name]
        rows[written[name] : written[name] + len(values)].copy_(values)
        written[name] += len(values)
    for name, parameter in parameters.items():
        num_rows = parameter.shape[0] * (parameter.shape[1] if parameter.dim() == 3 else 1)
        assert written[name] == num_rows or name.endswith(("embed_tokens.weight", "lm_head.weight")), name


class TrainerHere:
    """The decoder with random weights, its adapters' optimizer and what it publishes."""

    def __init__(self, args: argparse.Namespace, device: Device) -> None:
        import torch

        from slipstream.conf.architecture.families import read_config
        from slipstream.trainer.delivery.adapter_source import AdapterSource
        from slipstream.trainer.delivery.merged_source import TrainerWeightSource
        from slipstream.trainer.engine_ops.engine_forward import choose_forward
        from slipstream.trainer.model.build_decoder import build_decoder

        dtype = torch.bfloat16 if device is Device.cuda else torch.float32
        self.device, spec = torch.device(str(device)), read_config(config_of(args))
        self.lora = lora_of(args)
        match = Match.bitwise if args.mode == "bitwise" else Match.engine
        config = TrainerConfig(lora=self.lora, numerics=NumericsConfig(match=match))
        by = choose_forward(spec, dtype, config, self.device, args.weights)
        self.decoder = build_decoder(spec, dtype=dtype, device=self.device, trainer=config, by=by)
        torch.manual_seed(args.seed)
        self.adapters = []
        with torch.no_grad():
            for name, parameter in self.decoder.named_parameters():
                if parameter.requires_grad:
                    self.adapters.append(parameter)
                parameter.normal_(0.0, 0.02 if "lora_A" in name else args.std)
                if parameter.dim() == 1:
                    parameter.add_(1.0)
                if name.endswith("lora_B"):
                    parameter.zero_()
        self.optimizer = torch.optim.AdamW(self.adapters, lr=args.lr)
        self.source = TrainerWeightSource(self.decoder, rank=0, is_merged=args.weights is SyncMode.merged)
        self.adapter_source = AdapterSource(self.decoder, 0, self.lora)
        self.version = 0

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Every checkpoint tensor, with adapters in it or without, as a publish writes it."""
        import torch

        from slipstream.weight_sync.layout import Region

        self.source.begin(self.version)
        for meta in self.source.layout().tensors:
            out = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=self.device)
            self.source.read(meta.name, Region((0,) * len(meta.shape), meta.shape), out)
            yield meta.name, out
        self.source.end()
        self.version += 1

    def logprobs(self, responses: list[Response], *, learn: bool) -> tuple[list[float], float]:
        """Log-probabilities of all sampled tokens, and the seconds; with `learn` also gradients of a random loss."""
        import torch

        found: list[float] = []
        began = time.perf_counter()
        for batch in microbatches(responses):
            with torch.set_grad_enabled(learn):
                logprobs = self._logprobs(batch)
            if learn:
                (logprobs * torch.randn_like(logprobs)).mean().backward()
            found += logprobs.tolist()
        return found, time.perf_counter() - began

    def _logprobs(self, batch: list[Response]) -> Any:
        import torch

        from slipstream.trainer.model.logprobs import token_logprobs

        starts = list(itertools.accumulate((len(one.tokens) for one in batch), initial=0))
        tokens = torch.tensor([token for one in batch for token in one.tokens], device=self.device)
        positions = torch.cat([torch.arange(len(one.tokens)) for one in batch]).to(self.device)
        predictors = torch.cat(
            [
                torch.arange(start + one.num_prompt_tokens - 1, start + len(one.tokens) - 1)
                for start, one in zip(starts, batch, strict=False)
            ]
        ).to(self.device)
        hidden = self.decoder(tokens, positions, torch.tensor(starts)).index_select(0, predictors)
        return self.decoder.apply_head(
            lambda rows, weight: token_logprobs(
                rows, weight, tokens[predictors + 1], temperature=1.0, chunk_tokens=1024, head=self.decoder.by.head
            )[0],
            hidden,
        )

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def microbatches(responses: list[Response]) -> Iterator[list[Response]]:
    """Packed in order."""
    batch: list[Response] = []
    for one in responses:
        if batch and sum(len(x.tokens) for x in batch) + len(one.tokens) > MICROBATCH_TOKENS:
            yield batch
            batch = []
        batch.append(one)
    yield batch


def compare(mine: list[float], theirs: list[float]) -> dict[str, float]:
    """Figures of the log-ratio mine - theirs, per token."""
    import numpy as np

    log_ratio = np.array(mine, dtype=np.float64) - np.array(theirs, dtype=np.float64)
    return {
        "num_tokens": len(mine),
        "max_abs": float(np.abs(log_ratio).max()),
        "k3": float(np.mean(np.expm1(log_ratio) - log_ratio)),
        "num_different": int((log_ratio != 0).sum()),
    }


def prompts_of(args: argparse.Namespace, draw: random.Random, count: int) -> list[list[int]]:
    """Random tokens, of five lengths."""
    lengths = [min(draw.choice((5, 16, 40, 129, 300)), args.max_model_len - args.tokens) for _ in range(count)]
    return [[draw.randrange(args.vocab) for _ in range(length)] for length in lengths]


def run(args: argparse.Namespace, device: Device, folder: Path) -> dict[str, Any]:
    draw = random.Random(args.seed)
    engine, trainer = EngineHere(args, folder, device), TrainerHere(args, device)
    steps = []
    for step in range(args.steps):
        engine.load(trainer)
        count = (args.prompts, 7, args.prompts, 1)[step % 4]
        responses, sampling_s = engine.sample(prompts_of(args, draw, count), args.tokens)
        sampled = [logprob for one in responses for logprob in one.logprobs]
        forward_s = trainer.logprobs(responses, learn=False)[1] if step in (0, 2) else None
        mine, learning_s = trainer.logprobs(responses, learn=True)
        num_tokens = sum(len(one.tokens) for one in responses)
        found: dict[str, Any] = {"step": step, "requests": count, **compare(mine, sampled)}
        found |= {"entropy": -sum(sampled) / len(sampled), "engine_tokens_per_s": len(sampled) / sampling_s}
        found |= {"trainer_tokens_per_s": num_tokens / learning_s}
        if forward_s is not None:
            found["forward_tokens_per_s"] = num_tokens / forward_s
        if step in (0, 1):
            scored = [score for one in engine.score(responses) for score in one]
            found |= {"floor_max_abs": compare(scored, sampled)["max_abs"], "floor_k3": compare(scored, sampled)["k3"]}
            found["prefill_max_abs"] = compare(mine, scored)["max_abs"]
        print(json.dumps(found), flush=True)
        steps.append(found)
        trainer.step()
    return {"steps": steps}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, and what is sampled."""
    parser.add_argument("--family", choices=("qwen3", "qwen3_moe"), default="qwen3_moe")
    parser.add_argument("--weights", type=SyncMode, choices=tuple(SyncMode), default=SyncMode.merged)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    add_shape_options(parser, rank=32)
    parser.set_defaults(layers=8)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="sampled per prompt")
    parser.add_argument("--batched-tokens", type=int, default=2048, help="of one engine step: longer prompts are cut")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--std", type=float, default=0.06, help="of the random weights")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)


def prepare(args: argparse.Namespace) -> tuple[dict[str, Any], Device]:
    """Set the environment of the engine in this process. Returns the machine's facts and its device."""
    facts = environment(args.commit)
    device = Device.cuda if facts["gpus"] else Device.cpu
    os.environ.update(engine_environment(device))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ[BATCH_INVARIANT_VARIABLE] = str(int(args.mode == "bitwise"))
    return facts, device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--mode", choices=("bitwise", "default"), default="bitwise")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    args = parser.parse_args()
    facts, device = prepare(args)
    with tempfile.TemporaryDirectory() as folder:
        report = {"environment": facts, "arguments": {k: str(v) for k, v in vars(args).items()}}
        report |= run(args, device, Path(folder))
    args.out.mkdir(parents=True, exist_ok=True)
    slots = "-adapter" if args.weights is SyncMode.adapter else ""
    out = args.out / f"bitwise-{args.family}-{args.mode}{slots}.json"
    out.write_text(json.dumps(report, indent=2) + "\n")
    largest = max(step["max_abs"] for step in report["steps"])
    print(f"{args.family}, {args.mode}{slots}: largest |log-ratio| {largest}; written: {out}")
    if args.mode == "bitwise" and largest:
        sys.exit(1)


if __name__ == "__main__":
    main()
