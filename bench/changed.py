"""Which share of the elements that engines get changes from version to version.

    python bench/changed.py MODEL                          a folder of a chat model; a GPU if there is one
    python bench/changed.py MODEL --rows lora:1e-4 full:1e-6 lora-random:1e-4

The trainer learns right answers to sums (SFT, bench/rounding.py), with LoRA on all projections or in full, from the
model or from random weights of its shape. After --before steps what engines get is kept, and compared with what they
get one, two and four steps later, element by element, in bfloat16 by thresholds (in full training: to nearest). Full
training compares every third layer, which is what a host's memory holds. A row of the table:

    changed 1, 2, 4    share of the compared elements that differ after so many steps
    least, most        after one step, of the projections of one kind: the kind that changes least, and most
    figure             sync/changed_fraction of that step, which is a sample and counts tensors that never change; on a
                       GPU, because the trainer's own format is float32 on a CPU

Writes --out, row by row, with the environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from bench.environment import environment  # noqa: E402
from bench.rounding import sample_of, sums  # noqa: E402
from slipstream.conf.schema import (  # noqa: E402
    AlgorithmConfig,
    DType,
    Init,
    LoraConfig,
    ModelConfig,
    Objective,
    OptimConfig,
    TrainerConfig,
    TrainMode,
    WeightSyncConfig,
)
from slipstream.trainer.delivery.merged_source import TrainerWeightSource  # noqa: E402
from slipstream.trainer.options import TrainerOptions  # noqa: E402
from slipstream.trainer.rank import TrainerRank  # noqa: E402
from slipstream.trainer.types import Denominators, Sample  # noqa: E402

APART = (1, 2, 4)
ROWS = ["lora:1e-6", "lora:1e-5", "lora:1e-4", "lora-random:1e-5", "lora-random:1e-4", "full:1e-6", "full:1e-5"]


def rank_of(args: argparse.Namespace, kind: str, lr: float, device: str) -> TrainerRank:
    """A loaded trainer rank."""
    hf_config = json.loads((Path(args.model) / "config.json").read_text())
    dtype = DType.bfloat16 if device == "cuda" else DType.float32  # CPUs multiply float32 faster
    from_random = ModelConfig(init=Init.random, hf_config=hf_config, dtype=dtype)
    rank = TrainerRank(
        TrainerOptions(
            model=from_random if kind.endswith("random") else ModelConfig(path=args.model, dtype=dtype),
            trainer=TrainerConfig(
                mode=TrainMode.full if kind.startswith("full") else TrainMode.lora,
                lora=LoraConfig(rank=args.rank, alpha=2.0 * args.rank),
                optim=OptimConfig(lr=lr),
                activation_checkpointing=False,
                cuda_graph_tokens=0,
            ),
            algorithm=AlgorithmConfig(objective=Objective.sft),
            sampling_temperature=1.0,
            weight_sync=WeightSyncConfig(),
            seed=args.seed,
            num_steps=1000,
            world_size=1,
            rendezvous="",
            device=device,
            hf_config=hf_config,
            sync_key=b"",
        )
    )
    rank.load()
    return rank


def step(rank: TrainerRank, samples: list[Sample]) -> None:
    """One update."""
    version = rank.policy_version
    samples = [replace(sample, oldest_version=version) for sample in samples]
    rank.forward_backward([samples], Denominators(sum(int(s.loss_mask.sum()) for s in samples), len(samples), version))
    rank.optimizer_step()


def sent(rank: TrainerRank, device: str, *, thin: bool) -> tuple[dict[str, Tensor], float | None]:
    """What engines get of projections, as bits, and sync/changed_fraction."""
    source = rank.delivery.source
    assert isinstance(source, TrainerWeightSource)
    source.begin(rank.policy_version)
    found: dict[str, Tensor] = {}
    for shard in source.layout().shards:
        layer = shard.tensor.partition("layers.")[2].partition(".")[0]
        if shard.tensor.endswith("_proj.weight") and not (thin and int(layer) % 3):
            out = torch.empty(shard.region.shape, dtype=torch.bfloat16, device=device)
            source.read(shard.tensor, shard.region, out)
            found[shard.tensor] = out.view(torch.int16)
    figure = source.changed_fraction() if rank.decoder.dtype is torch.bfloat16 else None
    source.end()
    return found, figure


def row(args: argparse.Namespace, kind: str, lr: float, device: str) -> dict[str, Any]:
    """Train, and compare."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rank = rank_of(args, kind, lr, device)
    taught = [sample_of(*pair) for pair in sums(tokenizer, args.batch * (args.before + max(APART)), 1000 + args.seed)]
    found: dict[str, Any] = {"kind": kind, "lr": lr, "changed": {}}
    before: dict[str, Tensor] = {}
    for number in range(args.before + max(APART)):
        if number == args.before:
            before, _ = sent(rank, device, thin=kind.startswith("full"))
        step(rank, taught[number * args.batch : (number + 1) * args.batch])
        apart = number + 1 - args.before
        if apart not in APART:
            continue
        now, figure = sent(rank, device, thin=kind.startswith("full"))
        kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for name, bits in now.items():
            of_kind = kinds[name.split(".")[-2]]
            of_kind[0] += int(bits.ne(before[name]).sum())
            of_kind[1] += bits.numel()
        changed, total = (sum(of[part] for of in kinds.values()) for part in (0, 1))
        found["changed"][apart] = changed / total
        if apart == 1:
            found |= {"figure": figure, "kinds": {name: of[0] / of[1] for name, of in sorted(kinds.items())}}
    return found


def main() -> None:
    """Write the file, row by row, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="KIND:LR; KIND is lora, lora-random or full")
    parser.add_argument("--before", type=int, default=4, help="steps before the first look")
    parser.add_argument("--batch", type=int, default=64, help="answers of a step")
    parser.add_argument("--rank", type=int, default=32, help="of LoRA; alpha is twice as much")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="bench/results/changed-{cpu,gpu}-COMMIT.json")
    parser.add_argument("--commit", help="of a tree that is not a git checkout")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = environment(args.commit)
    path = (
        args.out
        or ROOT / "bench" / "results" / f"changed-{'gpu' if device == 'cuda' else 'cpu'}-{facts['commit']}.json"
    )
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    rows: list[dict[str, Any]] = []
    print("| | lr | changed 1 | 2 | 4 | least | most | figure |\n|---|---|---|---|---|---|---|---|", flush=True)
    for one in args.rows:
        kind, _, lr = one.partition(":")
        found = row(args, kind, float(lr), device)
        rows.append(found)
        path.write_text(json.dumps({"environment": facts, "options": options, "rows": rows}, indent=1) + "\n")
        least, most = (choose(found["kinds"].items(), key=lambda item: item[1]) for choose in (min, max))
        cells = [*(f"{found['changed'][apart]:.2%}" for apart in APART)]
        cells += [f"{name} {share:.2%}" for name, share in (least, most)] + [
            "" if found["figure"] is None else f"{found['figure']:.2%}"
        ]
        print(f"| {kind} | {lr} | {' | '.join(cells)} |", flush=True)
    print(path)


if __name__ == "__main__":
    main()
