"""How much of an adapter's update an engine gets: merged weights to nearest and by thresholds, adapters in slots, and
training on merged values.

    python bench/rounding.py MODEL                         a folder of a chat model; a GPU if there is one
    python bench/rounding.py MODEL --steps 1 4 --seeds 0   on a CPU, some minutes for 135M parameters
    python bench/rounding.py MODEL --adapters FOLDER       adapters of runs: FOLDER/NAME-seedN/step-K, in PEFT's format

The trainer learns right answers to sums (SFT with LoRA) and is looked at after some steps. --bases: "bf16"; "fp8",
where the model was quantized to block-FP8 before it is trained, engines hold such blocks, and their projections round
inputs, too; "bf16-in-fp8", where engines do and the trainer's base is bfloat16 (model.engine_format=block_fp8).
--values merged trains on the values that engines get, with gradients straight through. A row of the table is a median
over seeds:

    unchanged    share of the adapted elements that are stored as the base's
    kept         <engine - base, update> / <update, update>: 1 where engines get the update, 0 where they keep the base
    error        |engine - base - update| / |update|
    moved        share of the elements that are stored otherwise than one step before
    KL           of what engines get from the policy that is trained, per token of the answers, over the whole
                 vocabulary, in nats, which is what parity/k3 estimates: transformers' forward in float32 on both sides,
                 so that nothing but the rounding of weights differs
    as engine    the same with an engine's forward (bench/rounding_ways.py) beside the trained policy in float32
    of floor     "as engine" by the KL between the engine's and the float32 forward of the trained policy's own weights
    nll          of right answers that were not trained on, in nats per token

"base" and "trained" are the engine's forward of the base and of the trained policy's own weights, "trainer" is the
trainer's own forward (k3 of the answers' tokens instead of KL), each beside float32. The policy of --values merged is
the one with rounded weights. With --adapters, KL is of responses that the trained policy samples. Writes --out, row by
row, with the environment.
"""

import argparse
import json
import random
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from bench.environment import environment  # noqa: E402
from bench.rounding_ways import Forwards, Pairs, Policy, Published, divergence, policy_of, published  # noqa: E402
from slipstream.conf.schema import (  # noqa: E402
    Activations,
    AlgorithmConfig,
    DType,
    LoraConfig,
    Match,
    ModelConfig,
    NumericsByPlace,
    Objective,
    OptimConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from slipstream.trainer.adapter_io import load_adapter  # noqa: E402
from slipstream.trainer.options import TrainerOptions  # noqa: E402
from slipstream.trainer.rank import TrainerRank  # noqa: E402
from slipstream.trainer.types import Denominators, Sample  # noqa: E402
from slipstream.trainer.weights.shards import local_shards  # noqa: E402

COLUMNS = ("unchanged", "kept", "error", "moved", "kl", "kl_engine", "of_floor", "nll")
SAMPLED_TOKENS = 64


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
    """A trainer rank that learns sums, or gets adapters of runs."""

    def __init__(self, args: argparse.Namespace, base: str, lora: LoraConfig, seed: int, device: str) -> None:
        self.args, self.is_fp8 = args, base != "bf16"
        self.rank = TrainerRank(
            TrainerOptions(
                model=ModelConfig(path=args.model, dtype=DType.bfloat16 if device == "cuda" else DType.float32),
                trainer=TrainerConfig(
                    lora=lora,
                    optim=OptimConfig(lr=args.lr),
                    numerics=NumericsByPlace(match=Match.merged if args.values == "merged" else Match.engine),
                    activations=Activations.keep,
                    cuda_graph_tokens=0,
                ),
                algorithm=AlgorithmConfig(objective=Objective.sft),
                sampling_temperature=1.0,
                weight_sync=WeightSyncConfig(),
                seed=seed,
                num_steps=max(args.steps),
                world_size=1,
                rendezvous="",
                device=device,
                hf_config=json.loads((Path(args.model) / "config.json").read_text()),
                sync_key=b"",
            )
        )
        self.rank.load()
        if base == "fp8":
            own = published(self.rank.decoder, is_fp8=True, is_merged=False)
            with torch.no_grad():
                for held in local_shards(self.rank.decoder):
                    if held.tensor in own:
                        held.base.copy_(own[held.tensor].values)

    def step(self, samples: list[Sample]) -> None:
        """One update."""
        version = self.rank.policy_version
        counts = sum(int(sample.loss_mask.sum()) for sample in samples)
        samples = [replace(sample, oldest_version=version) for sample in samples]
        self.rank.forward_backward([samples], Denominators(counts, len(samples), version))
        self.rank.optimizer_step()

    def own_forward(self, pairs: Pairs) -> np.ndarray:
        """Log-probabilities of the answers' tokens by the trainer's own forward."""
        version = self.rank.policy_version
        samples = [replace(sample_of(*pair), oldest_version=version) for pair in pairs]
        return np.concatenate([one.logprobs for one in self.rank.score([samples], version)[0]]).astype(np.float64)

    def stored(self) -> dict[str, dict[str, Tensor]]:
        """What engines would get, by way and matrix."""
        return {way: {name: one.stored for name, one in of.items()} for way, of in self.policy().ways.items()}

    def policy(self) -> Policy:
        """The present one."""
        return policy_of(self.rank.decoder, is_fp8=self.is_fp8)


def distances(
    policy: Policy, way: dict[str, Published], own: dict[str, Published], before: dict[str, Tensor] | None
) -> dict[str, float | None]:
    """Figures of weights alone. `own`: the base as engines get it; `before`: what was stored one step before."""
    inner = square = off = 0.0
    unchanged = moved = total = 0
    for name, one in way.items():
        update = policy.exact[name].double() - policy.base[name].double()
        got = one.update_over(policy.base[name]).double()
        inner += float((update * got).sum())
        square += float((update * update).sum())
        off += float((got - update).square().sum())
        total += update.numel()
        unchanged += int((one.stored.float() == own[name].stored.float()).sum())
        moved += 0 if before is None else int((one.stored.float() != before[name].float()).sum())
    return {
        "unchanged": unchanged / total, "kept": inner / square, "error": (off / square) ** 0.5,
        "moved": None if before is None else moved / total,
    }  # fmt: skip


def figures(
    trained: Trained, forwards: Forwards, pairs: list[Any], before: dict[str, dict[str, Tensor]] | None, values: str
) -> dict[str, Any]:
    """One policy in all its ways."""
    policy, is_fp8 = trained.policy(), trained.is_fp8
    own = published(trained.rank.decoder, is_fp8=is_fp8, is_merged=False)
    if values == "merged":
        whole = {name: one.values for name, one in policy.ways["dithered"].items()}
        ways = {"merged values": policy.ways["dithered"]}
    else:
        whole, ways = policy.exact, policy.ways
    right_nll = forwards.in_float32(whole, pairs)[1]
    told = pairs
    if trained.args.adapters:
        told = forwards.sampled([prompt for prompt, _ in pairs], SAMPLED_TOKENS, seed=0)
    exact = forwards.in_float32(whole, told)[0]
    floor = forwards.as_engine({name: Published(v, v) for name, v in whole.items()}, told, is_fp8=is_fp8)
    floor = divergence(floor, exact)
    tokens = torch.tensor([token for _, answer in told for token in answer], device=exact.device)
    log_ratio = trained.own_forward(told) - exact.gather(1, tokens[:, None])[:, 0].double().cpu().numpy()
    own_figures = {
        "k3": float(np.mean(np.expm1(log_ratio) - log_ratio)),
        "nll": -float(trained.own_forward(pairs).mean()),
    }
    row: dict[str, Any] = {"trained_nll": right_nll, "floor": floor, "trainer": own_figures, "ways": {}}
    for title, way in ways.items():
        name = "dithered" if title == "merged values" else title
        found = distances(policy, way, own, None if before is None else before[name])
        if name == "slots":
            found |= {"unchanged": None, "moved": None}
        rounded = {matrix: one.whole() for matrix, one in way.items()}
        found["kl"] = divergence(forwards.in_float32(rounded, told)[0], exact)
        found["nll"] = forwards.in_float32(rounded, pairs)[1]
        found["kl_engine"] = divergence(forwards.as_engine(way, told, is_fp8=is_fp8), exact)
        found["of_floor"] = found["kl_engine"] / floor
        row["ways"][title] = found
    base = forwards.in_float32(policy.base, pairs)
    row["base_nll"] = base[1]
    row["base_floor"] = divergence(forwards.as_engine(own, pairs, is_fp8=is_fp8), base[0])
    return row


def trained_rows(args: argparse.Namespace, base: str, device: str) -> Iterator[dict[str, Any]]:
    """Train with each seed, and look after each of args.steps."""
    tokenizer, forwards = AutoTokenizer.from_pretrained(args.model), Forwards(args.model, device)
    held_out = sums(tokenizer, args.held_out, 1)
    for seed in args.seeds:
        taught = [sample_of(*pair) for pair in sums(tokenizer, args.batch * max(args.steps), 1000 + seed)]
        trained = Trained(args, base, LoraConfig(rank=args.rank, alpha=2.0 * args.rank), seed, device)
        before: dict[str, dict[str, Tensor]] | None = None
        for step in range(1, max(args.steps) + 1):
            if step in args.steps:
                before = trained.stored()
            trained.step(taught[(step - 1) * args.batch : step * args.batch])
            if step in args.steps:
                found = figures(trained, forwards, held_out, before, args.values)
                yield {"name": f"SFT, {args.values}", "base": base, "seed": seed, "step": step, **found}


def adapter_rows(args: argparse.Namespace, base: str, device: str) -> Iterator[dict[str, Any]]:
    """Look at each adapter below args.adapters."""
    tokenizer, forwards = AutoTokenizer.from_pretrained(args.model), Forwards(args.model, device)
    held_out = sums(tokenizer, args.held_out, 1)
    trained: Trained | None = None
    for config in sorted(args.adapters.glob("*-seed*/step-*/adapter_config.json")):
        found = re.fullmatch(r"(.+)-seed(\d+)/step-(\d+)", str(config.parent.relative_to(args.adapters)))
        if found is None:
            continue
        fields = json.loads(config.read_text())
        seed = int(found[2])
        if trained is None or trained.rank._options.seed != seed:
            trained = Trained(args, base, LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"]), seed, device)
        with torch.no_grad():
            load_adapter(trained.rank.decoder, config.parent)
        row = figures(trained, forwards, held_out, None, args.values)
        yield {"name": found[1], "base": base, "seed": seed, "step": int(found[3]), **row}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Medians over seeds."""
    print(f"| policy | after | way | {' | '.join(COLUMNS)} |\n|{'---|' * (3 + len(COLUMNS))}")
    for name, base, step in sorted({(row["name"], row["base"], row["step"]) for row in rows}):
        of_step = [row for row in rows if (row["name"], row["base"], row["step"]) == (name, base, step)]
        for way in of_step[0]["ways"]:
            cells = [_median([row["ways"][way][column] for row in of_step]) for column in COLUMNS]
            print(f"| {name}, {base} | {step} | {way} | {' | '.join(cells)} |")
        mine = {key: _median([row["trainer"][key] for row in of_step]) for key in ("k3", "nll")}
        ends = {
            key: _median([row[key] for row in of_step]) for key in ("base_floor", "floor", "base_nll", "trained_nll")
        }
        blanks = " | ".join([""] * 5)
        print(f"| {name}, {base} | {step} | base |{blanks}| {ends['base_floor']} | | {ends['base_nll']} |")
        print(f"| {name}, {base} | {step} | trained |{blanks}| {ends['floor']} | 1 | {ends['trained_nll']} |")
        print(f"| {name}, {base} | {step} | trainer |{blanks}| {mine['k3']} | | {mine['nll']} |")


def _median(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.3g}" if known else ""


def main() -> None:
    """Write the file, row by row, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--adapters", type=Path, help="look at these instead of training")
    parser.add_argument("--bases", nargs="+", choices=("bf16", "fp8", "bf16-in-fp8"), default=["bf16"])
    parser.add_argument(
        "--values", choices=("separate", "merged"), default="separate", help="that the trainer's forward takes"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 12, 50, 100])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=64, help="answers of a step")
    parser.add_argument("--held-out", type=int, default=64, help="answers that are looked at")
    parser.add_argument("--rank", type=int, default=32, help="of LoRA; alpha is twice as much")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, help="bench/results/rounding-{cpu,gpu}-COMMIT.json")
    parser.add_argument("--commit", help="of a tree that is not a git checkout")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = environment(args.commit)
    kind = "gpu" if device == "cuda" else "cpu"
    path = args.out or ROOT / "bench" / "results" / f"rounding-{kind}-{facts['commit']}.json"
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    rows: list[dict[str, Any]] = []
    for base in args.bases:
        for row in (adapter_rows if args.adapters else trained_rows)(args, base, device):
            rows.append(row)
            path.write_text(json.dumps({"environment": facts, "options": options, "rows": rows}, indent=1) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
    print_table(rows)
    print(path)


if __name__ == "__main__":
    main()
