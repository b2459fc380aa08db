"""One row of bench/parity.py, in a process of its own: the engine, transformers, and the trainer with each switch."""

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.parity_shapes import BITWISE, FACTS, LOAD_FORMAT, ROWS, SEED

RECORDED = 2
"""Sequences whose operations are recorded."""
HF_BATCH = 16
OTHER_ORDER = "trainer, norms added in another order"


class RowRun:
    """The cells of one row; what there is of them lies in a file after each.

    Args:
        name: Of the row.
        args: Of the command.
        made: A folder for the model's files.
        out: The file.
    """

    def __init__(self, name: str, args: argparse.Namespace, made: Path, out: Path) -> None:
        from slipstream.conf import schema
        from slipstream.orchestrator.inputs.model_folder import resolve_hf_config

        self.name, self.row, self.args, self.out = name, ROWS[name], args, out
        self.on_gpu = args.device == "cuda"
        self.folder, self.activations = made / "model", made / "activations"
        self.began = time.perf_counter()
        self.others: dict[str, list[Any]] = {}
        self.sampled: list[Any] = []
        self.cells: dict[str, Any] = {"row": name, "layers": self.row.layers, "std": self.row.std, "seconds": {}}
        config, bfloat16 = self.row.config(args.tiny), schema.DType.bfloat16
        std = 0.13 if args.tiny else self.row.std
        config = config | {"initializer_range": std}
        self.model = schema.ModelConfig(init=schema.Init.random, hf_config=config, dtype=bfloat16)
        self.hf_config = resolve_hf_config(self.model)
        self.folder.mkdir()
        (self.folder / FACTS).write_text(json.dumps({"seed": SEED, "std": std}))
        (self.folder / "config.json").write_text(json.dumps(self.hf_config))

    def done(self, what: str) -> None:
        """Keep what there is."""
        self.cells["seconds"][what] = round(time.perf_counter() - self.began, 1)
        self.out.write_text(json.dumps(self.cells))
        print(f"{self.name}: {what} at {self.cells['seconds'][what]} s", flush=True)

    def sample(self) -> None:
        """The engine's part; without routes where its kernels record none."""
        from slipstream.rollout.errors import EngineError

        try:
            self.sample_with(has_routes=self.on_gpu)
        except EngineError as error:
            if "experts" not in str(error):
                raise
            self.cells["routes_failed"] = str(error)
            self.sample_with(has_routes=False)
        self.compare("engine")

    def sample_with(self, *, has_routes: bool) -> None:
        """Start an engine, let it sample and prefill, and end it."""
        from slipstream.conf import schema
        from slipstream.conf.architecture.families import read_config
        from slipstream.orchestrator.parity.engine_side import sample_and_record
        from slipstream.rollout.types import EngineOptions, RoutingShape

        row, moe, routing = self.row, read_config(self.hf_config).moe, None
        if has_routes and moe is not None:
            layers = tuple(layer for layer, has_experts in enumerate(moe.layers) if has_experts)
            routing = RoutingShape(layers, moe.top_k, moe.num_experts)
        prompts, tokens = (4, 12) if self.args.tiny else (row.prompts, row.tokens)
        draw, vocab = random.Random(SEED), self.hf_config["vocab_size"]
        drawn = {"load_format": LOAD_FORMAT, "worker_extension_cls": "bench.random_loader.WeightReceiver"}
        options = EngineOptions(
            folder=self.folder,
            config=schema.RolloutConfig(
                max_num_batched_tokens=16384,
                gpu_memory_utilization=0.04,
                kv_cache_bytes=(2 << 30) if self.on_gpu else (64 << 20),
                enforce_eager=not row.is_compiled,
            ),
            dtype=schema.DType.bfloat16,
            device=schema.Device(self.args.device),
            routing=routing,
            batch_invariant=row.batch_invariant and self.on_gpu,
        )
        self.sampled = sample_and_record(
            options,
            [[draw.randrange(vocab) for _ in range(row.prompt_tokens)] for _ in range(prompts)],
            seed=SEED,
            max_tokens=tokens,
            num_recorded=0 if row.is_compiled else RECORDED,
            activations=self.activations,
            say=self.done,
            engine_arguments=drawn,
        )

    def ask_transformers(self) -> None:
        """Transformers' part; its failure does not end the row."""
        import torch

        dtypes = {"transformers": torch.bfloat16, "transformers, float32": torch.float32}
        for label, dtype in dtypes.items():
            if not self.row.with_hf or (dtype is torch.float32 and not self.row.with_fp32):
                continue
            try:
                self.others[label] = transformers_logprobs(self, dtype)
            except Exception as error:  # noqa: BLE001 - as said
                self.cells["transformers_failed"] = f"{label}: {type(error).__name__}: {error}"
            gc.collect()
            self.compare(label)

    def ask_trainer(self) -> None:
        """The trainer as it is, with routes replayed, and operation by operation."""
        from slipstream.orchestrator.parity.measure import compare_layers, read_tensors, responses_of

        scorer = self.score("trainer")
        routes = [(one.routes.experts, one.routes.is_recorded) for one in self.sampled if one.routes is not None]
        if routes and "replay" in self.row.others:
            rows, _ = scorer.logprobs([one.token_ids for one in self.sampled], routes)
            self.others["replay"] = responses_of(self.sampled, rows)
        self.score_in_another_order(scorer)
        self.compare("trainer")
        if not self.row.is_compiled:
            found = compare_layers(scorer, self.sampled[:RECORDED], read_tensors(self.activations))
            self.cells |= {"sentence": found.sentence, "flipped": found.flipped, "chained": found.chained}
            self.cells["swaps"] = {swap.block: swap.k3_mean for swap in found.swaps}
            self.cells["operations"] = worst_of(found.differences)
            self.done("operations")

    def turn_switches(self) -> None:
        """The trainer with other options, those of each label; a failure does not end the row."""
        for label in self.row.others:
            if label == "replay" or (label == BITWISE and not self.on_gpu):
                continue
            gc.collect()
            try:
                self.score(label, label.split(","))
            except Exception as error:  # noqa: BLE001 - as said
                self.cells.setdefault("failed_switches", {})[label] = f"{type(error).__name__}: {error}"
            self.compare(label)

    def score_in_another_order(self, scorer: Any) -> None:
        """The trainer beside itself, with the squares of its norms added in another order: the difference that two
        implementations have at least."""
        from unittest import mock

        from slipstream.orchestrator.parity.measure import responses_of
        from slipstream.trainer.kernels import rms_norm

        warps = rms_norm._warps
        with mock.patch.object(rms_norm, "_warps", lambda size: 2 * warps(size)):
            rows, _ = scorer.logprobs([one.token_ids for one in self.sampled])
        self.others[OTHER_ORDER] = responses_of(self.sampled, rows)

    def score(self, label: str, options: Sequence[str] = ()) -> Any:
        """Load a trainer with some options of its section changed, and score. Returns the scorer."""
        from slipstream.conf.schema import TrainerConfig
        from slipstream.orchestrator.parity.measure import responses_of
        from slipstream.trainer.scoring import Scorer

        trainer = TrainerConfig()
        for option in options:
            trainer = with_option(trainer, *option.split("="))
        scorer = Scorer(self.model, trainer, self.hf_config, seed=SEED, device=self.args.device)
        started = time.perf_counter()
        rows, entropies = scorer.logprobs([one.token_ids for one in self.sampled])
        self.others[label] = responses_of(self.sampled, rows)
        entropy = [value for one, row in zip(self.sampled, entropies) for value in one.response_of(row)]
        self.cells.setdefault("entropy", sum(entropy) / len(entropy))
        self.cells.setdefault("score_s", {})[label] = round(time.perf_counter() - started, 2)
        return scorer

    def compare(self, what: str) -> None:
        """All pairs that there are."""
        self.cells["matrix"] = matrix_of(self.sampled, self.others)
        self.done(what)


def with_option(trainer: Any, name: str, value: str) -> Any:
    """The options of a trainer with one of them, or one rounding, changed. Example: (TrainerConfig(), "combine",
    "hf_eager").
    """
    from slipstream.conf.schema import Match, NumericsByPlace, NumericsConfig

    if name == "numerics.match":
        return replace(trainer, numerics=NumericsConfig(match=Match(value)))
    places, place = trainer.numerics.places, name.removeprefix("numerics.")
    own = replace(places, **{place: type(getattr(places, place))(value)})
    return replace(trainer, numerics=NumericsByPlace(own=own))


def run_row(name: str, args: argparse.Namespace, out: Path) -> None:
    """All cells of one row."""
    shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="parity-", dir=shared_memory) as made:
        row = RowRun(name, args, Path(made), out)
        row.sample()
        row.ask_transformers()
        row.ask_trainer()
        row.turn_switches()


def matrix_of(sampled: Sequence[Any], others: dict[str, Any]) -> dict[str, Any]:
    """Everybody against the engine, and transformers against trainer and float32."""
    import torch

    from slipstream.orchestrator.parity.compare import agreement
    from slipstream.orchestrator.parity.measure import agreements

    matrix = {pair.removeprefix("engine, "): figures for pair, figures in agreements(sampled, {}).items()}
    engine = torch.tensor([value for one in sampled for value in one.decoded])
    whole = {label: torch.cat(rows) for label, rows in others.items()}
    for label, values in whole.items():
        if label not in ("transformers, float32", OTHER_ORDER):
            matrix[label] = agreement(engine, values)
    if OTHER_ORDER in whole:
        matrix[OTHER_ORDER] = agreement(whole["trainer"], whole[OTHER_ORDER])
    if "transformers" in whole and "trainer" in whole:
        matrix["transformers, trainer"] = agreement(whole["transformers"], whole["trainer"])
    if "transformers, float32" in whole:
        matrix["transformers, float32"] = agreement(whole["transformers"], whole["transformers, float32"])
        matrix["engine, float32"] = agreement(engine, whole["transformers, float32"])
        matrix["trainer, float32"] = agreement(whole.get("trainer", engine), whole["transformers, float32"])
    return matrix


def worst_of(differences: Sequence[Any]) -> dict[str, dict[str, float]]:
    """By kind of operation: median and largest difference over layers, and how many elements differ."""
    import statistics

    kinds: dict[str, list[Any]] = {}
    for found in differences:
        kinds.setdefault(found.kind, []).append(found)
    return {
        kind: {
            "median": statistics.median(one.relative for one in members),
            "largest": max(one.relative for one in members),
            "differing": statistics.median(one.differing for one in members),
            "flipped": max(one.flipped for one in members),
            "excess": max(one.excess for one in members),
        }
        for kind, members in kinds.items()
    }


def transformers_logprobs(row: RowRun, dtype: Any) -> list[Any]:
    """Log-probabilities of each response by transformers, on the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from slipstream.conf.architecture.families import read_config
    from slipstream.trainer.weights.loading import open_reader

    loader: Any = AutoModelForCausalLM
    device = row.args.device
    fields = {key: value for key, value in row.hf_config.items() if key not in ("model_type", "torch_dtype", "dtype")}
    with torch.device(device):
        hf = loader.from_config(AutoConfig.for_model(row.hf_config["model_type"], **fields), dtype=dtype)
    spec = read_config(row.hf_config)
    fill(hf, open_reader(row.model, spec, seed=SEED, device=device), spec)
    hf.eval()
    rows = []
    with torch.no_grad():
        for start in range(0, len(row.sampled), HF_BATCH):  # prompts have one length, and so have responses
            part = row.sampled[start : start + HF_BATCH]
            first, ids = part[0].num_prompt, torch.tensor([one.token_ids for one in part], device=device)
            logits = hf(ids, use_cache=False).logits[:, first - 1 : -1]
            rows += [
                one.float().log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu()
                for one, targets in zip(logits, ids[:, first:], strict=True)
            ]
            del logits
    del hf
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return rows


def fill(hf: Any, reader: Any, spec: Any) -> None:
    """The drawn tensors, rounded to bfloat16, by checkpoint name; transformers stacks experts, gate above up."""
    import torch

    from slipstream.weight_sync.layout import Region

    params = dict(hf.named_parameters()) | dict(hf.named_buffers())
    with torch.no_grad():
        for meta in spec.checkpoint_tensors("float32"):
            values = reader.read(meta.name, Region((0,) * len(meta.shape), meta.shape)).to(torch.bfloat16)
            prefix, _, rest = meta.name.partition(".experts.")
            if "." not in rest:
                params[meta.name].copy_(values)
                continue
            expert, leaf, _ = rest.split(".")
            if leaf == "down_proj":
                params[f"{prefix}.experts.down_proj"][int(expert)].copy_(values)
                continue
            width = values.shape[0]
            rows = slice(0, width) if leaf == "gate_proj" else slice(width, 2 * width)
            params[f"{prefix}.experts.gate_up_proj"][int(expert), rows].copy_(values)
