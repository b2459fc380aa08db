"""Which share of what engines get changes from version to version, in bfloat16 and in block-FP8.

    python bench/changed.py MODEL --rows lora:1e-4 full:1e-6 --out FILE

MODEL is a folder of a chat model, in bfloat16 or in block-FP8. The trainer learns right answers to sums (SFT), eight a
step. A row is KIND:LR; KIND is lora (r=32 on all projections), lora-random (from random weights of the shape) or full.
After four steps every third layer's projections, as engines get them, are compared with those 1, 2 and 4 steps later:

    values, scales    share that have other bits
    elements          the same of two bytes, as a record of a stream holds them: in FP8 two neighbouring values
    sent              what weight_sync.delta_bytes sends of the bytes of a `whole` publish, if each tensor is one chunk
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from bench.environment import environment  # noqa: E402
from examples.real_model.tasks import rows as rows_of  # noqa: E402
from slipstream.conf import schema  # noqa: E402
from slipstream.trainer.delivery.merged_source import TrainerWeightSource  # noqa: E402
from slipstream.trainer.rank import TrainerRank  # noqa: E402
from slipstream.trainer.types import (  # noqa: E402
    Denominators,
    Sample,
    TrainerOptions,
)
from slipstream.trainer.weights.quantization import SCALE_SUFFIX, BlockFp8  # noqa: E402
from slipstream.weight_sync.changes import max_records, stream_bytes  # noqa: E402

BATCH, BEFORE, APART = 8, 4, (1, 2, 4)


def rank_of(path: str, hf_config: dict[str, Any], kind: str, lr: float) -> TrainerRank:
    """A loaded trainer rank, in float32, which CPUs multiply faster."""
    mode, _, init = kind.partition("-")
    source: dict[str, Any] = {"init": schema.Init.random, "hf_config": hf_config} if init else {"path": path}
    lora, optim = schema.LoraConfig(rank=32, alpha=64.0), schema.OptimConfig(lr=lr)
    trainer = schema.TrainerConfig(mode=schema.TrainMode(mode), lora=lora, optim=optim)
    rank = TrainerRank(
        TrainerOptions(
            model=schema.ModelConfig(dtype=schema.DType.float32, **source), hf_config=hf_config, trainer=trainer,
            algorithm=schema.AlgorithmConfig(objective=schema.Objective.sft), weight_sync=schema.WeightSyncConfig(),
            sampling_temperature=1.0, seed=0, num_steps=1000, device="cpu", sync_key=b"",
        )
    )  # fmt: skip
    rank.load()
    return rank


def sample_of(tokenizer: Any, row: dict[str, Any], version: int) -> Sample:
    """A question and its right answer, which is taught."""
    terms = row["prompt"][-1]["content"].removeprefix("What is ").partition("?")[0]
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    answer = f"{terms} = {row['answer']}.\nAnswer: {row['answer']}{tokenizer.eos_token}"
    asked, said = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
    mask, zeros = np.arange(len(asked + said)) >= len(asked), np.zeros(len(asked + said), np.float32)
    return Sample(np.array(asked + said, np.int32), mask, zeros, zeros, version)


def sent(source: TrainerWeightSource, names: set[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Projections as engines get them, and their scales."""
    found: dict[str, Tensor] = {}
    source.begin(0)
    for shard in source.layout().shards:
        if shard.tensor.removesuffix(SCALE_SUFFIX) in names:
            own = dtype if shard.tensor in names else torch.float32
            found[shard.tensor] = torch.empty(shard.region.shape, dtype=own)
            source.read(shard.tensor, shard.region, found[shard.tensor])
    source.end()
    return found


def compared(before: dict[str, Tensor], now: dict[str, Tensor]) -> dict[str, float]:
    changed, total = Counter[str](), Counter[str]()
    for name, tensor in now.items():
        differs = tensor.view(torch.uint8).ne(before[name].view(torch.uint8)).flatten()  # by byte
        sizes = {"scales": 4} if name.endswith(SCALE_SUFFIX) else {"values": tensor.itemsize, "elements": 2}
        counts = {kind: int(differs.view(-1, size).any(1).sum()) for kind, size in sizes.items()}
        records = counts.get("elements", len(differs))  # scales go whole
        num_bytes = stream_bytes(len(differs), records) if records <= max_records(len(differs)) else len(differs)
        changed.update({**counts, "sent": num_bytes})
        total.update({kind: len(differs) // size for kind, size in {**sizes, "sent": 1}.items()})
    return {kind: changed[kind] / total[kind] for kind in total} | {"whole": total["sent"]}


def row(path: str, kind: str, lr: str) -> dict[str, Any]:
    """Train, and compare: format -> number of steps -> what changed."""
    hf_config = json.loads((Path(path) / "config.json").read_text())
    rank, tokenizer = rank_of(path, hf_config, kind, float(lr)), AutoTokenizer.from_pretrained(path)
    tensors = rank.decoder.spec.checkpoint_tensors("bfloat16")
    fp8 = BlockFp8(frozenset(BlockFp8.hf_entry(tensors)["modules_to_not_convert"]))
    asked = {torch.bfloat16: None, torch.float8_e4m3fn: fp8}
    sources = {form: TrainerWeightSource(rank.decoder, 0, quantization) for form, quantization in asked.items()}
    names = {name for name in fp8.shapes(tensors) if int(name.partition("layers.")[2].partition(".")[0]) % 3 == 0}
    looks: dict[int, dict[torch.dtype, dict[str, Tensor]]] = {}
    for version in range(BEFORE + max(APART)):
        samples = [sample_of(tokenizer, one, version) for one in rows_of("sums", BATCH, version)]
        rank.forward_backward([samples], Denominators(sum(s.num_valid_tokens for s in samples), BATCH, version))
        rank.optimizer_step()
        if (apart := version + 1 - BEFORE) in (0, *APART):
            looks[apart] = {form: sent(source, names, form) for form, source in sources.items()}
    found = {str(form): {n: compared(looks[0][form], looks[n][form]) for n in APART} for form in asked}
    return {"kind": kind, "lr": float(lr), "formats": found}


def main() -> None:
    """Write the file, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", nargs="+", required=True, metavar="KIND:LR")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "rows": []}
    for one in args.rows:
        report["rows"].append(row(args.model, *one.split(":")))
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
