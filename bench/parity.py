"""How well trainer, engine and transformers agree about sampled tokens, on layers of real width.

    python bench/parity.py                           all rows, on one GPU, as many at a time as fit it
    python bench/parity.py --only qwen3-30b-a3b-12 trained
    python bench/parity.py --tiny                    two small layers of each, a CPU will do

Each row is a process of its own: vLLM (eager, or compiled with CUDA graphs as in a run) draws random bfloat16 weights
by name, samples at temperature 1 and prefills what it sampled (the floor); then transformers and the trainer draw the
same weights and score the same tokens, the trainer once for each switch, and its operations are compared with an eager
engine's one by one. The `trained` rows have
weights with real entropy: the trainer fits 125 million of them to Python's own source code, byte by byte, for
--train-s seconds (full training, AdamW, the supervised objective), and both read that checkpoint. The rows, and what
they were at 3ab0fe5, are in bench/parity_shapes.py. Writes bench/results/parity-<device>.json, row by row.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # instead of this folder, where bench/trainer.py hides the package trainer

from bench.environment import environment  # noqa: E402
from bench.parity_shapes import FACTS, LOAD_FORMAT, ROWS, Row  # noqa: E402

SEED = 0
SPARE_GIB = 8
"""Part of the GPU's memory for contexts of processes and for what others have."""
RECORDED = 2
TEXT_BYTES = 8 << 20
HF_BATCH = 16
WINDOW = 512
"""Bytes of one sequence in training."""
COLUMNS = ("engine prefill", "transformers", "trainer", "transformers, trainer", "transformers, float32")


# ---- one row, in its own process ----


class RowRun:
    """The cells of one row; what there is of them lies in a file after each.

    Args:
        name: Of the row.
        args: Of the command.
        made: A folder for the model's files.
        out: The file.
    """

    def __init__(self, name: str, args: argparse.Namespace, made: Path, out: Path) -> None:
        from conf import schema
        from orchestrator.inputs.model_folder import resolve_hf_config

        self.name, self.row, self.args, self.out = name, ROWS[name], args, out
        self.on_gpu = args.device == "cuda"
        self.folder, self.activations = made / "model", made / "activations"
        self.began = time.perf_counter()
        self.others: dict[str, list[Any]] = {}
        self.sampled: list[Any] = []
        self.cells: dict[str, Any] = {"row": name, "layers": self.row.layers, "std": self.row.std, "seconds": {}}
        self.cells["old"] = {} if args.tiny else self.row.old
        config, bfloat16 = self.row.config(args.tiny), schema.DType.bfloat16
        if self.row.is_trained:
            self.cells["training"] = train_on_text(config, self.folder, args)
            self.done("trained")
            self.model = schema.ModelConfig(path=str(self.folder), dtype=bfloat16)
            self.hf_config = resolve_hf_config(self.model)
            return
        std = 0.13 if args.tiny else self.row.std
        self.model = schema.ModelConfig(init=schema.Init.random, hf_config=config, init_std=std, dtype=bfloat16)
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
        from rollout.errors import EngineError

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
        from conf import schema
        from orchestrator.parity.engine_side import WITH_WEIGHTS, sample_and_record
        from rollout.types import RoutingShape
        from trainer.architecture.families import read_config

        row, moe, routing = self.row, read_config(self.hf_config).moe, None
        if has_routes and moe is not None:
            layers = tuple(layer for layer, has_experts in enumerate(moe.layers) if has_experts)
            routing = RoutingShape(layers, moe.top_k, moe.num_experts)
        prompts, tokens = (4, 12) if self.args.tiny else (row.prompts, row.tokens)
        drawn = {"load_format": LOAD_FORMAT, "worker_extension_cls": "bench.random_loader.WeightReceiver"}
        self.sampled = sample_and_record(
            self.folder,
            schema.RolloutConfig(
                max_num_batched_tokens=16384,
                gpu_memory_utilization=0.04,
                kv_cache_bytes=(2 << 30) if self.on_gpu else (64 << 20),
                batch_invariant=row.batch_invariant and self.on_gpu,
                enforce_eager=not row.is_compiled,
            ),
            prompts_of(row, self.hf_config, prompts),
            dtype=schema.DType.bfloat16,
            device=schema.Device(self.args.device),
            seed=SEED,
            max_tokens=tokens,
            num_recorded=0 if row.is_compiled else RECORDED,
            activations=self.activations,
            routing=routing,
            say=self.done,
            engine_arguments=WITH_WEIGHTS if row.is_trained else drawn,
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
        from orchestrator.parity.measure import compare_layers, read_tensors, responses_of

        scorer = self.score("trainer")
        routes = [(one.routes.experts, one.routes.is_recorded) for one in self.sampled if one.routes is not None]
        if routes and "replay" in self.row.others:
            rows, _ = scorer.logprobs([one.token_ids for one in self.sampled], routes)
            self.others["replay"] = responses_of(self.sampled, rows)
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
            if label == "replay" or (label.startswith("engine_forward") and not self.on_gpu):
                continue
            gc.collect()
            try:
                self.score(label, label.split(","))
            except Exception as error:  # noqa: BLE001 - as said
                self.cells.setdefault("failed_switches", {})[label] = f"{type(error).__name__}: {error}"
            self.compare(label)

    def score(self, label: str, options: Sequence[str] = ()) -> Any:
        """Load a trainer with some options of its section changed, and score. Returns the scorer."""
        from conf.schema import TrainerConfig
        from orchestrator.parity.measure import responses_of
        from trainer.scoring import Scorer

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


def with_option(section: Any, name: str, value: str) -> Any:
    """A section of the options with one of them changed. Example: (TrainerConfig(), "numerics.norm", "each")."""
    first, _, rest = name.partition(".")
    before = getattr(section, first)
    if rest:
        return replace(section, **{first: with_option(before, rest, value)})
    return replace(section, **{first: value == "true" if isinstance(before, bool) else type(before)(value)})


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

    from orchestrator.parity.compare import agreement
    from orchestrator.parity.measure import agreements

    matrix = {pair.removeprefix("engine, "): figures for pair, figures in agreements(sampled, {}).items()}
    engine = torch.tensor([value for one in sampled for value in one.decoded])
    whole = {label: torch.cat(rows) for label, rows in others.items()}
    for label, values in whole.items():
        if label != "transformers, float32":
            matrix[label] = agreement(engine, values)
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


def prompts_of(row: Row, hf_config: dict[str, Any], count: int) -> list[list[int]]:
    """Random tokens; of the trained model, text that it was not trained on."""
    draw = random.Random(SEED)
    if not row.is_trained:
        vocab = hf_config["vocab_size"]
        return [[draw.randrange(vocab) for _ in range(row.prompt_tokens)] for _ in range(count)]
    held_out = real_text()[-(TEXT_BYTES // 64) :]
    starts = [draw.randrange(len(held_out) - row.prompt_tokens) for _ in range(count)]
    return [list(held_out[start : start + row.prompt_tokens]) for start in starts]


def real_text() -> bytes:
    """Python's standard library, in the order of its file names, as it ships with every Python."""
    parts, size = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= TEXT_BYTES:
            break
    return b"".join(parts)


def train_on_text(hf_config: dict[str, Any], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Full training by the product's trainer rank, from random weights, into a checkpoint."""
    import numpy as np

    from conf import schema
    from trainer.rank import TrainerRank
    from trainer.types import Denominators, Sample

    num_steps, batch = (4, 2) if args.tiny else (100_000, 64)
    rank = TrainerRank(
        model=schema.ModelConfig(
            init=schema.Init.random, hf_config=hf_config, init_std=0.02, dtype=schema.DType.bfloat16
        ),
        trainer=schema.TrainerConfig(
            mode=schema.TrainMode.full,
            optim=schema.OptimConfig(lr=1e-3, warmup_steps=20),
            activation_checkpointing=False,
        ),
        algorithm=schema.AlgorithmConfig(objective=schema.Objective.sft),
        sampling_temperature=1.0,
        weight_sync=schema.WeightSyncConfig(),
        seed=SEED,
        num_steps=num_steps,
        rank=0,
        world_size=1,
        rendezvous="",
        device=args.device,
        hf_config=hf_config,
        sync_key=b"slipstream-bench-parity",
    )
    rank.load()
    text = np.frombuffer(real_text()[: -(TEXT_BYTES // 64)], np.uint8).astype(np.int32)
    draw = np.random.default_rng(SEED)
    mask = np.arange(WINDOW) > 0
    began, losses = time.perf_counter(), []
    for _ in range(num_steps):
        starts = draw.integers(0, len(text) - WINDOW, batch)
        samples = [
            Sample(
                token_ids=text[start : start + WINDOW],
                loss_mask=mask,
                rollout_logprobs=np.zeros(WINDOW, np.float32),
                advantages=mask.astype(np.float32),
                oldest_version=rank.policy_version,
            )
            for start in starts
        ]
        count = batch * int(mask.sum())
        stats = rank.forward_backward([samples], Denominators(count, batch, rank.policy_version))
        rank.optimizer_step()
        losses.append(stats.sums["sft/nll_sum"] / count)
        if time.perf_counter() - began > args.train_s:
            break
    rank.save_merged(folder)
    seconds = time.perf_counter() - began
    rank.shutdown()
    gc.collect()
    return {"steps": len(losses), "seconds": seconds, "first_nll": losses[0], "last_nll": float(np.mean(losses[-10:]))}


def transformers_logprobs(row: RowRun, dtype: Any) -> list[Any]:
    """Log-probabilities of each response by transformers, on the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.architecture.families import read_config
    from trainer.weights.loading import open_reader

    loader: Any = AutoModelForCausalLM
    device = row.args.device
    if row.model.path is not None:
        hf = loader.from_pretrained(row.folder, dtype=dtype).to(device)
    else:
        fields = {
            key: value for key, value in row.hf_config.items() if key not in ("model_type", "torch_dtype", "dtype")
        }
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

    from weight_sync.layout import Region

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


# ---- all rows ----


class Memory:
    """GPU memory that rows take turns with."""

    def __init__(self, gib: int) -> None:
        self._free, self._changed = gib, threading.Condition()

    def take(self, gib: int) -> None:
        """Wait until so much is free, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= gib)
            self._free -= gib

    def give_back(self, gib: int) -> None:
        """Free it again."""
        with self._changed:
            self._free += gib
            self._changed.notify_all()


def print_table(report: dict[str, Any]) -> None:
    """k3 (largest |d|) of each cell, the old k3 behind it, and the switches below."""
    print(f"\n{'row':<22}{'nats':>6}  " + "".join(f"{column:>30}" for column in COLUMNS))
    for name, row in report["rows"].items():
        matrix = row.get("matrix", {})
        cells = [_cell(matrix.get(column), row.get("old", {}).get(column)) for column in COLUMNS]
        print(f"{name:<22}{row.get('entropy', float('nan')):>6.2f}  " + "".join(f"{cell:>30}" for cell in cells))
        for label, figures in matrix.items():
            if label not in COLUMNS:
                ratio = figures["k3_mean"] / (matrix["engine prefill"]["k3_mean"] or float("nan"))
                print(f"{'':<8}{label:<84}{_cell(figures, None):>18}   {ratio:.2f} x the floor")
        for trouble in ("failed", "routes_failed", "transformers_failed", "failed_switches", "sentence"):
            if trouble in row:
                print(f"{'':<30}{trouble}: {row[trouble]}")


def _cell(figures: dict[str, float] | None, old: float | None) -> str:
    if figures is None:
        return "-"
    told = f"{figures['k3_mean']:.2e}, {figures['max_abs_log_ratio']:.2g}"
    return told if old is None else f"{told} (was {old:g})"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--jobs", type=int, default=3, help="rows that run side by side")
    parser.add_argument("--train-s", type=float, default=60.0, help="how long the trained rows train")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="when rows are ended; what they have is kept")
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a CPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.jobs = 1
    return args


def main() -> None:
    """Run the rows, each in a process of its own, and keep what each has."""
    args = parse()
    if args.row is not None:
        args.device = os.environ["PARITY_DEVICE"]
        run_row(args.row, args, args.out)
        os._exit(0)  # not after an exception: torch's and vLLM's threads may keep the process
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    out: Path = args.out or ROOT / "bench" / "results" / f"parity-{'gpu' if device == 'cuda' else 'cpu'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(args.commit), "tiny": args.tiny, "rows": {}}
    print(json.dumps(report["environment"]), flush=True)
    total_gib = torch.cuda.mem_get_info()[1] // 2**30 - SPARE_GIB if device == "cuda" else 1000
    memory, lock, ends_at = Memory(total_gib), threading.Lock(), time.monotonic() + args.limit_s

    def run(name: str) -> None:
        part, gib = out.with_suffix(f".{name}.part"), min(ROWS[name].gib, total_gib)
        memory.take(gib)
        words = ["--row", name, "--out", str(part), "--train-s", str(args.train_s), *(["--tiny"] if args.tiny else [])]
        seen = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PARITY_DEVICE": device}
        with out.with_suffix(f".{name}.log").open("w") as log:
            command = [sys.executable, __file__, *words]
            process = subprocess.Popen(command, env=seen, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(max(1.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its engine ends with it
                code = process.wait()
        memory.give_back(gib)
        with lock:
            row: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {"row": name}
            report["rows"][name] = row | ({"failed": f"exit code {code}"} if code else {})
            part.unlink(missing_ok=True)
            out.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{name}: {'failed, ' if code else ''}{row.get('seconds')}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, args.only))
    report["rows"] = {name: report["rows"][name] for name in args.only}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    print(f"written: {out}")
    if any("failed" in row for row in report["rows"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
