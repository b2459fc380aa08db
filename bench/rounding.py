"""How much of an adapter's update an engine of merged weights gets: rounded to nearest, and by thresholds.

    python bench/rounding.py MODEL                         a folder of a chat model; a GPU if there is one
    python bench/rounding.py MODEL --steps 1 4 --seeds 0   on a CPU, some minutes for 135M parameters

The trainer learns right answers to sums (SFT with LoRA) and is looked at after some steps. A row of the table is a
median over seeds:

    unchanged    share of the adapted elements whose merged bfloat16 value is that of the base
    kept         <engine - base, update> / <update, update>: 1 where engines get the update, 0 where they keep the base
    KL           of the policy with rounded weights from the trained one, per token of the answers, over the whole
                 vocabulary, in nats: what parity/k3 estimates. Both are transformers' forward in float32, so that
                 nothing but the rounding of weights differs
    nll          of right answers that were not trained on, in nats per token, beside the base's and the trained one's
    moved        share of the adapted elements whose rounded value differs from the one of the row before

Prints its environment and a table; writes bench/results/rounding-{cpu,gpu}-COMMIT.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from bench.environment import environment  # noqa: E402
from conf.schema import (  # noqa: E402
    AlgorithmConfig,
    DType,
    LoraConfig,
    ModelConfig,
    Objective,
    OptimConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from trainer.rank import TrainerRank  # noqa: E402
from trainer.types import Denominators, Sample  # noqa: E402
from trainer.weights.shards import local_shards  # noqa: E402

ROUNDINGS = ("nearest", "dithered")


def sums(tokenizer: Any, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Pairs of tokens: a question and its right answer."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        terms = [draw.randint(2, 60) for _ in range(draw.choice([2, 3]))]
        question = f"What is {' + '.join(map(str, terms))}? Think briefly, then end with 'Answer: ' and the number."
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        answer = f"{' + '.join(map(str, terms))} = {sum(terms)}.\nAnswer: {sum(terms)}{tokenizer.eos_token}"
        pairs.append(tuple(tokenizer.encode(part, add_special_tokens=False) for part in (prompt, answer)))
    return pairs


def sample_of(prompt: list[int], answer: list[int]) -> Sample:
    """Taught: the answer alone."""
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    zeros = np.zeros(len(mask), dtype=np.float32)
    return Sample(np.array(prompt + answer, dtype=np.int32), mask, zeros, zeros, oldest_version=0)


class Trained:
    """A trainer rank that learns sums, and the weights of its policy."""

    def __init__(self, args: argparse.Namespace, seed: int, device: str) -> None:
        config = json.loads((Path(args.model) / "config.json").read_text())
        self.rank = TrainerRank(
            # CPUs multiply float32 faster; the base's values are those of bfloat16 either way.
            model=ModelConfig(path=args.model, dtype=DType.bfloat16 if device == "cuda" else DType.float32),
            trainer=TrainerConfig(
                lora=LoraConfig(rank=args.rank, alpha=2.0 * args.rank),
                optim=OptimConfig(lr=args.lr),
                activation_checkpointing=False,
                cuda_graph_tokens=0,
            ),
            algorithm=AlgorithmConfig(objective=Objective.sft),
            sampling_temperature=1.0,
            weight_sync=WeightSyncConfig(),
            seed=seed,
            num_steps=max(args.steps),
            rank=0,
            world_size=1,
            rendezvous="",
            device=device,
            hf_config=config,
            sync_key=b"",
        )
        self.rank.load()

    def step(self, samples: list[Sample]) -> None:
        """One update."""
        version = self.rank.policy_version
        counts = sum(int(sample.loss_mask.sum()) for sample in samples)
        samples = [replace(sample, oldest_version=version) for sample in samples]
        self.rank.forward_backward([samples], Denominators(counts, len(samples), version))
        self.rank.optimizer_step()

    @torch.no_grad()
    def weights(self) -> dict[str, dict[str, Tensor]]:
        """By adapted checkpoint tensor: "base", "exact" (float32, not rounded), and by rounding, in bfloat16."""
        found: dict[str, dict[str, Tensor]] = {}
        for held in local_shards(self.rank.decoder):
            if held.delta is None:
                continue
            to_nearest = replace(held, delta=replace(held.delta, rounding_key=None))
            of_tensor = {"base": held.base.detach().bfloat16()}
            for name, shard, dtype in (
                ("exact", to_nearest, torch.float32), ("nearest", to_nearest, torch.bfloat16),
                ("dithered", held, torch.bfloat16),
            ):  # fmt: skip
                of_tensor[name] = torch.empty(held.region.shape, dtype=dtype, device=held.base.device)
                shard.read(held.region, of_tensor[name], {})
            found[held.tensor] = of_tensor
        return found


@torch.no_grad()
def log_probabilities(model: nn.Module, weights: dict[str, Tensor], pairs: list[Any]) -> tuple[list[Tensor], float]:
    """Score the answers under these weights: (log-probabilities of the whole vocabulary at each token, mean nll)."""
    parameters = dict(model.named_parameters())
    for name, values in weights.items():
        parameters[name].copy_(values)
    rows, nll = [], []
    for prompt, answer in pairs:
        tokens = torch.tensor([prompt + answer], device=next(iter(parameters.values())).device)
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
        rows.append(logits.log_softmax(-1))
        nll.append(-rows[-1].gather(1, tokens[0, len(prompt) :, None]).sum())
    return rows, float(sum(nll)) / sum(len(answer) for _, answer in pairs)


def divergence(rounded: list[Tensor], exact: list[Tensor]) -> float:
    """Mean over tokens of KL(rounded || exact): tokens are sampled by the engine."""
    per_token = [(one.exp() * (one - other)).sum(-1) for one, other in zip(rounded, exact, strict=True)]
    return float(torch.cat(per_token).mean())


def figures(
    weights: dict[str, dict[str, Tensor]], model: nn.Module, pairs: list[Any], before: dict[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """One policy: its two roundings."""
    exact, exact_nll = log_probabilities(model, {name: one["exact"] for name, one in weights.items()}, pairs)
    row: dict[str, Any] = {"trained_nll": exact_nll}
    for rounding in ROUNDINGS:
        inner = square = 0.0
        unchanged = moved = total = 0
        for name, one in weights.items():
            update = (one["exact"] - one["base"].float()).double()
            got = (one[rounding].float() - one["base"].float()).double()
            inner += float((update * got).sum())
            square += float((update * update).sum())
            unchanged += int((one[rounding] == one["base"]).sum())
            moved += int((one[rounding] != (before.get(name) or {rounding: one["base"]})[rounding]).sum())
            total += update.numel()
        logprobs, nll = log_probabilities(model, {name: one[rounding] for name, one in weights.items()}, pairs)
        row[rounding] = {
            "unchanged": unchanged / total, "kept": inner / square, "kl": divergence(logprobs, exact), "nll": nll,
            "moved": moved / total,
        }  # fmt: skip
    return row


def run_seed(args: argparse.Namespace, seed: int, device: str) -> list[dict[str, Any]]:
    """Train, and look after each of args.steps."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    taught = [sample_of(*pair) for pair in sums(tokenizer, args.batch * max(args.steps), 1000 + seed)]
    held_out = sums(tokenizer, args.held_out, 1)
    auto: Any = AutoModelForCausalLM  # which is typed for one model
    model = auto.from_pretrained(args.model, dtype=torch.float32).to(device)
    trained = Trained(args, seed, device)
    base_nll = log_probabilities(model, {}, held_out)[1]
    rows: list[dict[str, Any]] = []
    before: dict[str, dict[str, Tensor]] = {}
    for step in range(1, max(args.steps) + 1):
        trained.step(taught[(step - 1) * args.batch : step * args.batch])
        if step in args.steps:
            weights = trained.weights()
            rows.append({"seed": seed, "step": step, "base_nll": base_nll, **figures(weights, model, held_out, before)})
            before = weights
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 12, 50, 100])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=64, help="answers of a step")
    parser.add_argument("--held-out", type=int, default=64, help="answers that are looked at")
    parser.add_argument("--rank", type=int, default=32, help="of LoRA; alpha is twice as much")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--commit", help="of a tree that is not a git checkout")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = environment(args.commit)
    print(json.dumps(facts, indent=2))
    rows = [row for seed in args.seeds for row in run_seed(args, seed, device)]
    heads = ["after", *(f"{name}, {kind}" for name in ("unchanged", "kept", "KL", "moved") for kind in ROUNDINGS)]
    print(f"| {' | '.join([*heads, 'nll: base, trained, nearest, dithered'])} |\n|{'---|' * (len(heads) + 1)}")
    for step in args.steps:
        of_step = [row for row in rows if row["step"] == step]

        def median(*path: str, of_step: list[dict[str, Any]] = of_step) -> float:
            return statistics.median(row[path[0]] if len(path) == 1 else row[path[0]][path[1]] for row in of_step)

        cells = [f"{median(kind, key):.3g}" for key in ("unchanged", "kept", "kl", "moved") for kind in ROUNDINGS]
        nll = [median("base_nll"), median("trained_nll"), *(median(kind, "nll") for kind in ROUNDINGS)]
        print(f"| {step} steps | {' | '.join(cells)} | {', '.join(f'{value:.3f}' for value in nll)} |")
    kind = "gpu" if device == "cuda" else "cpu"
    path = ROOT / "bench" / "results" / f"rounding-{kind}-{facts['commit']}.json"
    path.write_text(json.dumps({"environment": facts, "options": vars(args), "rows": rows}, indent=1) + "\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
