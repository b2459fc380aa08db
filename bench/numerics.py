"""What each item of trainer.numerics is worth beside an engine, and what it costs: k3 and tokens/s, on one GPU.

    python bench/numerics.py                                   8 layers of Qwen3-30B-A3B, a compiled engine, three seeds
    python bench/numerics.py --family qwen3 --hidden 4096      a dense Qwen3
    python bench/numerics.py --price gpt-oss-20b-6             tokens/s alone, of other shapes and of long sequences
    python bench/numerics.py --tiny --eager --family qwen3     two small layers in float32, for a CPU: all items alike

On a CPU vLLM keeps experts in an order of its own, which this script does not write: no figures of a mixture there.

For each seed the trainer draws weights, learns twice from a random loss, so that its adapters are not 0, and publishes;
the engine samples, and scores what it sampled by prefill (the floor). Then the trainer scores the same tokens with all
items as the engine has them, with one of them the other way, with the defaults, and with all the other way; the table
shows medians over seeds. Tokens/s are of the forward, and of forward and backward, each the median of --repeats.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.bitwise import EngineHere, Response, TrainerHere, add_options, compare, prepare, prompts_of  # noqa: E402
from bench.shapes import shrink  # noqa: E402
from bench.training.item_prices import SHAPES, measure_prices  # noqa: E402
from slipstream.conf.schema import (  # noqa: E402
    AdapterValues,
    AttentionValues,
    CombineMode,
    Device,
    NumericsByPlace,
    Rounding,
    Roundings,
    RouterFormat,
    TrainerConfig,
)

AS_ENGINE = TrainerConfig(numerics=NumericsByPlace(adapters=AdapterValues.merged))
"""All items as a compiled engine of merged weights has them."""
OTHER_WAY: dict[str, Any] = {
    "attention": AttentionValues.own,
    "norm": Rounding.each,
    "rotation": Rounding.each,
}
"""By item, transformers' way or the trainer's own."""
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {"dense_activation": Rounding.each},
    "qwen3_moe": {
        "expert_activation": Rounding.once,
        "router_weights": RouterFormat.model,
        "combine": CombineMode.fp32_once,
    },
}


def ways(family: str) -> Iterator[tuple[str, TrainerConfig]]:
    """What is compared, by name."""
    yield "all as the engine", AS_ENGINE
    others = OTHER_WAY | OF_FAMILY[family]
    yield "adapters", TrainerConfig()
    for name, choice in others.items():
        own = Roundings(**{name: choice})
        yield name, TrainerConfig(numerics=NumericsByPlace(adapters=AdapterValues.merged, own=own))
    yield "defaults", TrainerConfig()
    own = Roundings(**{"combine": CombineMode.fp32_once, **others})
    yield "all the other way", TrainerConfig(numerics=NumericsByPlace(own=own))


def measure(trainer: TrainerHere, responses: list[Response], repeats: int) -> dict[str, Any]:
    """k3 of the sampled tokens, and medians of tokens/s after one call of each."""
    sampled = [logprob for one in responses for logprob in one.logprobs]
    found: dict[str, Any] = compare(trainer.logprobs(responses, learn=False)[0], sampled)
    num_tokens = sum(len(one.tokens) for one in responses)
    for name, learn in (("forward", False), ("forward_backward", True)):
        seconds = [trainer.logprobs(responses, learn=learn)[1] for _ in range(repeats + learn)][learn:]
        found[f"{name}_tokens_per_s"] = num_tokens / statistics.median(seconds)
    trainer.optimizer.zero_grad()
    return found


def run_seed(args: argparse.Namespace, device: Device, engine: EngineHere) -> dict[str, Any]:
    """All ways of one seed."""
    draw, trainer = random.Random(args.seed), TrainerHere(args, device)
    engine.load(trainer)
    responses, _ = engine.sample(prompts_of(args, draw, args.prompts), args.tokens)
    for _ in range(2):
        trainer.logprobs(responses, learn=True)
        trainer.step()
    engine.load(trainer)
    responses, sampling_s = engine.sample(prompts_of(args, draw, args.prompts), args.tokens)
    sampled = [logprob for one in responses for logprob in one.logprobs]
    scored = [score for one in engine.score(responses) for score in one]
    found: dict[str, Any] = {"floor": compare(scored, sampled), "entropy": -sum(sampled) / len(sampled)}
    found["engine_tokens_per_s"] = len(sampled) / sampling_s
    for name, config in ways(args.family):
        trainer.round_as(config)
        found[name] = measure(trainer, responses, args.repeats)
        print(args.seed, name, json.dumps(found[name]), flush=True)
    return found


def print_table(seeds: dict[str, dict[str, Any]]) -> None:
    """Medians over seeds, and the range of k3."""
    floor = statistics.median(one["floor"]["k3"] for one in seeds.values())
    print(f"\n{'':<24}{'k3':>9}{'range':>20}{'of the floor':>14}{'forward':>10}{'and backward, tokens/s':>24}")
    for name in next(iter(seeds.values())):
        if name in ("entropy", "engine_tokens_per_s"):
            continue
        k3s = [one[name]["k3"] for one in seeds.values()]
        k3 = statistics.median(k3s)
        line = f"{name:<24}{k3:>9.2e}{f'{min(k3s):.2e}-{max(k3s):.2e}':>20}{k3 / (floor or float('nan')):>14.3g}"
        for speed in ("forward_tokens_per_s", "forward_backward_tokens_per_s"):
            if name != "floor":
                line += f"{statistics.median(one[name][speed] for one in seeds.values()):>14,.0f}"
        print(line)
    print(f"engine: {statistics.median(one['engine_tokens_per_s'] for one in seeds.values()):,.0f} tokens/s")


def main() -> None:
    """Measure, print, and write the file after each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--price", nargs="+", choices=SHAPES, help="no engine: what the items cost these shapes")
    parser.add_argument("--tiny", action="store_true", help="two small layers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    args = parser.parse_args()
    args.mode = "default"
    if args.tiny:
        shrink(args)
        args.head_dim, args.prompts, args.tokens = 32, 4, 8
    facts, device = prepare(args)
    if args.price:
        out = args.out or ROOT / "bench" / "results" / f"numerics-price-{device}.json"
        measure_prices(args, {"environment": facts}, out)
        print(f"written: {out}")
        return
    out = args.out or ROOT / "bench" / "results" / f"numerics-{args.family}{'-eager' * args.eager}-{device}.json"
    report: dict[str, Any] = {"environment": facts, "arguments": {k: str(v) for k, v in vars(args).items()}}
    report["seeds"] = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = EngineHere(args, Path(folder), device)
        for seed in args.seeds:
            of_seed = copy.copy(args)
            of_seed.seed = seed
            report["seeds"][str(seed)] = run_seed(of_seed, device, engine)
            out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report["seeds"])
    print(f"written: {out}")


if __name__ == "__main__":
    main()
