"""A row of bench/parity.py --learned: trainer and engine after the adapters have learned.

    row "model"    --model FOLDER, a chat model: SFT on sums (bench/rounding.py), prompts are other sums
    other rows     random weights: SFT on what the engine sampled from them, prompts are other random tokens

Both with the product's trainer rank at --learn-lr, whose AdamW moves a factor by about that much a step, whatever the
loss: so an update has the size that training gives. After each of --learn-steps the weights are published once to
nearest and once by thresholds into one engine in this process, which samples at temperature 1 and prefills what it
sampled (the floor). k3 is the trainer's beside the engine's; "fresh" is before the first step, where both roundings
give the base. What else is in a k3 say the forwards of bench/parity_exact.py over the same tokens.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.bitwise import EngineHere, Response, compare, write_over
from bench.parity_exact import SAME_WEIGHTS, Float32Forward, Weights, rounded, with_numerics
from bench.parity_shapes import ROWS, SEED

MODEL_ROW = "model"
ROUNDINGS = ("nearest", "dithered")
MICROBATCH_TOKENS = 8192
NO_FLOOR = 1e-9


class LearnedEngine(EngineHere):
    """The engine of a folder, in this process."""

    def __init__(self, folder: Path, args: argparse.Namespace, max_model_len: int, *, eager: bool) -> None:
        from vllm import LLM

        from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
        from slipstream.rollout.engine.engine_options import engine_arguments
        from slipstream.rollout.in_vllm.vllm_patches import keep_linear_weights_in_place

        is_gpu = args.device == "cuda"
        options = RolloutConfig(
            max_model_len=max_model_len,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            gpu_memory_utilization=0.1,
            kv_cache_bytes=(4 << 30) if is_gpu else (256 << 20),
            enforce_eager=eager,
            sampling=SamplingConfig(max_tokens=args.learn_tokens),
        )
        if not is_gpu:
            keep_linear_weights_in_place()
        device = Device(args.device)
        self.llm = LLM(**engine_arguments(folder, options, dtype=DType.bfloat16, device=device, seed=SEED))
        self.slots = None

    def take(self, weights: Iterator[tuple[str, Any]]) -> None:
        """Hold these weights."""
        self.llm.apply_model(lambda model: write_in_form(model, weights))
        self.llm.reset_prefix_cache()


def write_in_form(model: Any, weights: Iterator[tuple[str, Any]]) -> None:
    """As a commit does: kernels for CPUs read experts in an order of their own."""
    import torch

    from slipstream.rollout.in_vllm.post_load import Forms
    from slipstream.weight_sync.layout import PostLoad

    write_over(model, weights)
    forms = Forms.of(model, torch.bfloat16)
    for name, form in forms.post_load.items():
        if form is PostLoad.repack:
            forms.repack(name, forms.params[name].data)


class LearnedRow:
    """A trainer rank, an engine, and what they are asked."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        from slipstream.conf import schema
        from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
        from slipstream.trainer.options import TrainerOptions
        from slipstream.trainer.rank import TrainerRank

        self.args, self.is_chat = args, name == MODEL_ROW
        bfloat16 = schema.DType.bfloat16
        if self.is_chat:
            model = schema.ModelConfig(path=str(args.model), dtype=bfloat16)
        else:
            config, std = ROWS[name].config(args.tiny), 0.13 if args.tiny else ROWS[name].std
            config = config | {"initializer_range": std}
            model = schema.ModelConfig(init=schema.Init.random, hf_config=config, dtype=bfloat16)
        hf_config = resolve_hf_config(model)
        (folder / "config.json").write_text(json.dumps(hf_config))
        self.vocab_size = int(hf_config["vocab_size"])
        self.ends = (int(hf_config["eos_token_id"]),) if self.is_chat else ()
        trainer = schema.TrainerConfig(
            lora=schema.LoraConfig(rank=32, alpha=64.0),
            optim=schema.OptimConfig(lr=args.learn_lr),
            activations=schema.Activations.keep if self.is_chat else schema.Activations.recompute,
            cuda_graph_tokens=0,
        )
        self.rank = TrainerRank(
            TrainerOptions(
                model=model,
                trainer=trainer,
                algorithm=schema.AlgorithmConfig(objective=schema.Objective.sft),
                sampling_temperature=1.0,
                weight_sync=schema.WeightSyncConfig(),
                seed=SEED,
                num_steps=max(args.learn_steps),
                world_size=1,
                rendezvous="",
                device=args.device,
                hf_config=hf_config,
                sync_key=b"slipstream-bench-parity",
            )
        )
        self.rank.load()
        decoder = self.rank.decoder
        self.decoders = {"trainer": decoder} | {
            way: with_numerics(decoder, trainer, numerics, SEED) for way, numerics in SAME_WEIGHTS.items()
        }
        self.float32 = Float32Forward(hf_config, args.device)
        longest = 128 if self.is_chat else 16
        self.engine = LearnedEngine(folder, args, longest + args.learn_tokens + 1, eager=args.device != "cuda")
        self.taught = self._made_up(args.learn_batch * max(args.learn_steps))
        self.prompts = [prompt for prompt, _ in self._pairs(args.learn_prompts, seed=1)]

    def weights(self, rounding: str) -> Iterator[tuple[str, Any]]:
        """Every checkpoint tensor, as a publish writes it."""
        with Weights(self.rank.decoder, rounding) as weights:
            for name in weights.metas:
                yield name, weights.stored(name)

    def learn(self, step: int) -> None:
        """One update."""
        from slipstream.trainer.types import Denominators

        batch, version = self.args.learn_batch, self.rank.policy_version
        samples = [replace(one, oldest_version=version) for one in self.taught[step * batch : (step + 1) * batch]]
        denominators = Denominators(sum(one.num_valid_tokens for one in samples), len(samples), version)
        self.rank.forward_backward(list(microbatches(samples)), denominators)
        self.rank.optimizer_step()

    def measure(self, rounding: str) -> dict[str, Any]:
        """Publish, sample, prefill and score."""
        self.engine.take(self.weights(rounding))
        responses, _ = self.engine.sample(self.prompts, self.args.learn_tokens, self.ends)
        sampled = [logprob for one in responses for logprob in one.logprobs]
        scored = [score for one in self.engine.score(responses) for score in one]
        found: dict[str, Any] = {"floor": compare(scored, sampled)}
        mine = {}
        for way, decoder in self.decoders.items():
            with rounded(decoder, rounding):
                mine[way] = self.scores(responses, decoder)
            found[way] = compare(mine[way], sampled)
        with Weights(self.rank.decoder, rounding) as weights:
            stored = self.float32.logprobs(list(weights.metas), weights.stored, responses)
            exact = self.float32.logprobs(list(weights.metas), weights.exact, responses)
        found["engine, float32"] = compare(stored, sampled)
        found["weights, float32"] = compare(exact, stored)
        found["trainer, float32"] = compare(exact, mine["trainer"])
        return found

    def scores(self, responses: list[Response], decoder: Any) -> list[float]:
        """The log-probabilities of the sampled tokens by one of the trainer's decoders."""
        samples = [sample_of(one.tokens, one.num_prompt_tokens) for one in responses]
        version = self.rank.policy_version
        samples = [replace(one, oldest_version=version) for one in samples]
        forward = replace(self.rank.policy, decoder=decoder)
        parts = [forward.scores(part, version) for part in microbatches(samples)]
        return [logprob for part in parts for one in part for logprob in one.logprobs.tolist()]

    def _pairs(self, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
        if self.is_chat:
            from transformers import AutoTokenizer

            from bench.rounding import sums

            return sums(AutoTokenizer.from_pretrained(self.args.model), count, seed)
        draw = random.Random(seed)
        return [([draw.randrange(self.vocab_size) for _ in range(16)], []) for _ in range(count)]

    def _made_up(self, count: int) -> list[Any]:
        """What is taught."""
        pairs = self._pairs(count, seed=1000)
        if self.is_chat:
            return [sample_of(prompt + answer, len(prompt)) for prompt, answer in pairs]
        self.engine.take(self.weights("nearest"))
        responses, _ = self.engine.sample([prompt for prompt, _ in pairs], self.args.learn_tokens)
        return [sample_of(one.tokens, one.num_prompt_tokens) for one in responses]


def sample_of(tokens: list[int], num_prompt: int) -> Any:
    """Counted: what follows the prompt."""
    import numpy as np

    from slipstream.trainer.types import Sample

    zeros = np.zeros(len(tokens), dtype=np.float32)
    return Sample(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= num_prompt, zeros, zeros, 0)


def microbatches(samples: list[Any]) -> Iterator[list[Any]]:
    """Packed in order."""
    batch: list[Any] = []
    for one in samples:
        if batch and sum(x.num_tokens for x in batch) + one.num_tokens > MICROBATCH_TOKENS:
            yield batch
            batch = []
        batch.append(one)
    yield batch


def run_learned(name: str, args: argparse.Namespace, out: Path) -> None:
    """All figures of one row, in a file after each."""
    from slipstream.conf.schema import Device
    from slipstream.rollout.engine.engine_options import engine_environment

    os.environ.update(engine_environment(Device(args.device)))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = time.perf_counter()
    cells: dict[str, Any] = {"row": name, "lr": args.learn_lr, "batch": args.learn_batch, "steps": {}}
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        row = LearnedRow(name, args, Path(folder))
        for step in range(max(args.learn_steps) + 1):
            if step in (0, *args.learn_steps):
                told: dict[str, Any] = {}
                for rounding in ROUNDINGS if step else ("fresh",):
                    told[rounding] = row.measure(rounding)
                    cells["steps"][str(step)] = told
                    cells["seconds"] = round(time.perf_counter() - began, 1)
                    out.write_text(json.dumps(cells))
                    print(f"{name}: step {step}, {rounding}: {json.dumps(told[rounding])}", flush=True)
            if step < max(args.learn_steps):
                row.learn(step)


def print_learned(report: dict[str, Any]) -> None:
    """k3 by row, step and rounding; the trainer's also as multiples of the floor, the engine's own arithmetic, and what
    it is with fresh adapters."""
    ways = ("trainer", *SAME_WEIGHTS, "engine, float32", "weights, float32", "trainer, float32")
    heads = ("row", "steps", "weights", "floor", *ways, "of the floor", "of engine, float32", "of fresh")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, row in report["rows"].items():
        fresh = row.get("steps", {}).get("0", {}).get("fresh")
        for step, told in row.get("steps", {}).items():
            for rounding, found in told.items():
                k3 = {way: found[way]["k3"] for way in ("floor", *ways) if way in found}
                # An engine whose decoding has the bits of its prefill has no floor.
                under = [k3["floor"] if k3["floor"] > NO_FLOOR else None, k3.get("engine, float32")]
                under.append(fresh["trainer"]["k3"] if fresh else None)
                ratios = ["-" if value is None else f"{k3['trainer'] / value:.2f}" for value in under]
                cells = [f"{k3[way]:.3g}" if way in k3 else "-" for way in ("floor", *ways)]
                print(f"| {' | '.join([name, step, rounding, *cells, *ratios])} |")
        if "failed" in row:
            print(f"{name}: {row['failed']}")
