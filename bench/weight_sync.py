"""Publishes merged weights into a live engine, and measures each stage, the bare wire and peers.

    python bench/weight_sync.py --tiny                            everything once on a CPU, with real processes
    python bench/weight_sync.py --plan 1x1                        2 GPUs: one trainer rank -> vLLM TP=1, 256 requests
    python bench/weight_sync.py --plan 2x2                        4 GPUs: two ranks, EP=2 + FSDP2 -> vLLM TP=2 with EP,
                                                                  then TP=2 without
    python bench/weight_sync.py --plan 4x4                        8 GPUs
    python bench/weight_sync.py --plan 2x2 --colocate             2 GPUs, each with a trainer rank and an engine rank:
                                                                  2x2's code path at full size, not its speed
    python bench/weight_sync.py --plan 1x1 --colocate             1 GPU for both

The model has Qwen3-30B-A3B's shape (61 GB) by default. The source is the product's own decoder with random weights and
LoRA on attention and all experts. A and B are drawn anew before every publish, and all parameters are sent. Figures are
medians over the publishes after the warm-up. Publishes with and without hashes alternate (on, off, off, on, ...), so
that other changes affect both. Each begins when all requests are decoding, after those that the publish before had
frozen were prefilled again. "wire" is Mooncake's transfer_sync_write between the same two processes into the engine's
largest parameter; with several ranks it is one rank's. "of wire" compares the writes of one rank with it. "excess" is
the pause minus the publish; it is below 0 where changes are sent before the engine pauses. The memory of the GPUs that
take part is sampled every millisecond (NVML): "trainer" is the growth during publishes over what was in use before
staging was allocated, "engine" over what was in use right before each publish. "handed" is what torch's allocator gave
out in the engine's processes between begin and commit; it had most of that already. bench/sync/peers.py and the output
say what peers' figures include.

Writes a table, bench/results/weight_sync-<plan>.json, a timeline for ui.perfetto.dev and, with matplotlib, a PNG.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from bench.shapes import add_shape_options, model_config  # noqa: E402
from bench.sync import peers  # noqa: E402
from bench.sync.engine_process import EngineSpec, run_engine  # noqa: E402
from bench.sync.figures import plot, show  # noqa: E402
from bench.sync.memory import MemorySampler, Samples  # noqa: E402
from bench.sync.trainer_process import MIB, Row, TrainerSpec, run_rank, trainer_config  # noqa: E402

PARTS = ("begin_s", "write_s", "verify_s", "commit_s")
"""Stages that do not overlap. The remaining time of a publish is "rest": the link waits for a slot to be packed, rank 0
adds up and sends messages."""
STAGES = ("begin_s", "idle_s", "mark_s", "prepare_s", "write_s", "verify_s", "commit_s", "total_s", "pause_s")
VISIBLE = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
"""Names of the GPUs that this bench may use; empty: all, by their numbers."""
START_TIMEOUT_S = 240.0
ROW_TIMEOUT_S = 180.0


class Child:
    def __init__(self, target: Any, spec: Any, gpus: list[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(spec, theirs))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(VISIBLE[gpu] if VISIBLE else str(gpu) for gpu in gpus)
        self.process.start()
        theirs.close()

    def answer(self, timeout_s: float) -> Any:
        """Its next answer. Raises if the process dies or answers with an error."""
        end = time.monotonic() + timeout_s
        while not self.pipe.poll(1):
            if not self.process.is_alive():
                raise RuntimeError(f"{self.process.name} ended with code {self.process.exitcode}")
            if time.monotonic() > end:
                raise TimeoutError(f"{self.process.name}: no answer within {timeout_s:g} s")
        return peers.answer(self.pipe)


class Bench:
    """The trainer's ranks, which run as long as the bench, and one engine at a time."""

    def __init__(self, args: argparse.Namespace, num_ranks: int, device: str, folder: str) -> None:
        self.args, self.device, self.num_ranks = args, device, num_ranks
        self.hf_config = model_config(args)
        self.sampler = MemorySampler()
        rendezvous = f"file://{folder}/rendezvous"
        specs = [
            TrainerSpec(self.hf_config, device, rank, num_ranks, rendezvous, args.rank, bool(args.delta), args.merge)
            for rank in range(num_ranks)
        ]
        self.trainer = trainer_config(specs[0])
        self.ranks = [Child(run_rank, spec, [spec.rank]) for spec in specs]
        self.are_ready = False

    def wait_for_ranks(self) -> None:
        """Wait until all have their weights; later calls return at once."""
        for rank in () if self.are_ready else self.ranks:
            rank.answer(START_TIMEOUT_S)
        self.are_ready = True

    def everywhere(self, *order: Any, timeout_s: float = ROW_TIMEOUT_S) -> list[Any]:
        """Send one order to all ranks. Returns their answers."""
        for rank in self.ranks:
            rank.pipe.send(order)
        return [rank.answer(timeout_s) for rank in self.ranks]

    def measure(
        self, spec: EngineSpec, rows: dict[str, Row], *, is_last: bool, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        """Measure all rows with one engine, then the peers. `keep` gets the figures after each."""
        gpus = [gpu + (0 if spec.is_colocated else self.num_ranks) for gpu in range(spec.tp_size)]
        if spec.is_colocated:
            self.wait_for_ranks()  # vLLM measures free memory at its start
        began = time.monotonic()
        engine = Child(run_engine, spec, gpus)
        try:
            self.wait_for_ranks()
            endpoint = engine.answer(START_TIMEOUT_S)
            found: dict[str, Any] = {"engine": spec.title, "num_requests": spec.num_requests}
            found["start_s"] = time.monotonic() - began
            print(f"{spec.title}: started in {found['start_s']:.1f} s", flush=True)
            self.ranks[0].pipe.send(
                ("wire", endpoint, 5, spec.tp_size - 1 if spec.is_colocated else 0)
            )  # to another GPU, if there is one
            found["wire"] = self.ranks[0].answer(ROW_TIMEOUT_S)
            first = Row(watermark_bytes=64 * MIB if self.device == "cuda" else 16 * MIB, warm_up=0, publishes=1)
            self.row("first", first, spec, engine, gpus, endpoint)  # loads kernels and opens links
            found["rows"] = []
            for title, row in rows.items():
                if title == "factors":
                    self.row("base", replace(first, sends="base"), spec, engine, gpus, endpoint)
                    endpoint = ask(engine, "merge", self.trainer)
                found["rows"] += self.row(title, row, spec, engine, gpus, endpoint)
                keep(found)
            found["num_generated_tokens"] = ask(engine, "tokens")
            found["peers"] = {}
            keep(found)
            if is_last and not self.args.no_peers:
                for name, peer in self.peer_runs(spec, engine.pipe, gpus).items():
                    found["peers"][name] = peers.attempt(name, [engine.pipe, self.ranks[0].pipe], peer)
                    keep(found)
            engine.pipe.send(("end",))
            engine.process.join(20)
        finally:
            engine.process.kill()
            engine.process.join()

    def row(
        self, title: str, row: Row, spec: EngineSpec, engine: Child, gpus: list[int], endpoint: str
    ) -> list[dict[str, Any]]:
        """Measure one set of options with hashes and, if both alternate, without."""
        self.everywhere("settle_memory")
        self.sampler.start()
        facts = self.everywhere("open_row", row, endpoint)[0]

        def publish(verify_hashes: bool, trace: Path | None = None) -> dict[str, Any]:
            waited_s = ask(engine, "settle", spec.num_requests)
            report = self.everywhere("publish", verify_hashes, trace)[0] | {"settle_s": waited_s}
            stages = " ".join(f"{stage}={report[stage]:.4f}" for stage in STAGES)
            print(f"{title} {'with' if verify_hashes else 'without'} hashes: {stages}", flush=True)
            return report

        for _ in range(row.warm_up):
            publish(True)
        ask(engine, "allocated")
        reports = [publish(verify_hashes) for verify_hashes in row.turns()]
        allocated = ask(engine, "allocated")
        samples = self.sampler.samples()
        if row.trace is not None:
            publish(True, row.trace)
        facts["parts"] = self.everywhere("close_row")[0]
        memory = self.memory(samples, gpus, reports) | {
            "engine_handed_out_bytes": max((most for rank in allocated for most in rank), default=None)
        }
        kinds = {title: True, "no hashes": False} if row.is_pair else {title: True}
        return [
            self.figures(name, row, [r for r in reports if r["verify_hashes"] is on], facts | memory)
            for name, on in kinds.items()
        ]

    def memory(self, samples: Samples, gpus: list[int], reports: list[dict[str, Any]]) -> dict[str, Any]:
        """Growth of device memory during these publishes."""
        windows = [(report["began"], report["began"] + report["total_s"]) for report in reports]
        return {
            "trainer_growth_bytes": samples.growth(range(self.num_ranks), windows, over_start=True),
            "engine_growth_bytes": samples.growth(gpus, windows, over_start=False),
            "memory_sampling": {"num_samples": len(samples.times_s), "mean_period_s": samples.mean_period_s},
        }

    def figures(self, title: str, row: Row, reports: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
        medians = {stage: statistics.median(report[stage] for report in reports) for stage in STAGES}
        num_bytes = reports[0]["num_bytes"]
        return {
            "title": title,
            "watermark_bytes": row.watermark_bytes,
            "share": row.share,
            "delta_bytes": row.delta_bytes,
            "changed_fraction": reports[-1]["changed_fraction"],
            "verify_hashes": reports[0]["verify_hashes"],
            **facts,
            "num_bytes": num_bytes,
            **medians,
            "rest_s": statistics.median(report["total_s"] - sum(report[part] for part in PARTS) for report in reports),
            "total_s_min": min(report["total_s"] for report in reports),
            "total_s_max": max(report["total_s"] for report in reports),
            "excess_pause_s": max(report["pause_s"] - report["total_s"] for report in reports),
            "write_gb_per_s_per_rank": num_bytes / self.num_ranks / medians["write_s"] / 1e9,
            "accounted_peak_bytes": reports[0]["peak_bytes"],
            "reports": reports,
        }

    def peer_runs(self, spec: EngineSpec, engine: Connection, gpus: list[int]) -> dict[str, Callable[[], Any]]:
        config, rank0, repeats = self.hf_config, self.ranks[0].pipe, self.args.peer_updates
        return {
            "vllm_nccl": lambda: peers.vllm_nccl(config, engine, rank0, spec.tp_size, repeats),
            "checkpoint_engine": lambda: peers.checkpoint_engine(config, engine, gpus, repeats),
        }

    def close(self) -> None:
        self.sampler.close()
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.pipe.send(("end",))
        for rank in self.ranks:
            rank.process.join(20)
            rank.process.kill()


def ask(engine: Child, *order: Any) -> Any:
    """Send one order to the engine. Returns its answer."""
    engine.pipe.send(order)
    return engine.answer(60)


def rows_of(args: argparse.Namespace, is_first: bool, folder: Path, title: str) -> dict[str, Row]:
    base = Row(warm_up=args.warm_up, publishes=args.publishes)
    if args.tiny:
        base = replace(base, watermark_bytes=16 * MIB)
    trace = folder / f"weight_sync-{args.name}-{title.replace(' ', '-')}-trace.json"
    rows = {"hashes": replace(base, is_pair=True, trace=trace)}
    for number, percent in enumerate(args.delta):
        row = replace(base, share=percent / 100, delta_bytes=args.delta_mib * MIB)
        rows[f"{percent:g} %"] = row if number else replace(row, trace=trace.with_stem(f"{trace.stem}-changes"))
        if number == 0:
            rows[f"{percent:g} % or whole"] = replace(row, chooses=True, warm_up=max(3, base.warm_up))
    for mib in args.watermark_mib if is_first else ():
        few = replace(base, watermark_bytes=mib * MIB, publishes=max(1, args.publishes // 3), warm_up=1)
        rows[f"{mib} MiB"] = few
    if args.merge:
        rows["factors"] = replace(base, sends="factors")
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("1x1", "2x2", "4x4"), default="1x1", help="trainer ranks x engine GPUs")
    parser.add_argument("--tiny", action="store_true", help="a small model; what a CPU can do")
    parser.add_argument("--engine", choices=("plain", "vllm"), default="vllm")
    parser.add_argument("--colocate", action="store_true", help="trainer and engine ranks on the same GPUs; no peers")
    parser.add_argument("--only", choices=("EP", "TP"), help="of 2x2 and 4x4: one of the two engines")
    add_shape_options(parser, rank=32)
    parser.add_argument("--publishes", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--watermark-mib", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument(
        "--delta", type=float, nargs="*", default=[],
        help="a row each: only changes are sent (weight_sync.delta_bytes), of which there are so many percent; with a "
        "timeline for the first, and a row of what a run does, which sends everything where that is quicker",
    )  # fmt: skip
    parser.add_argument(
        "--merge", action="store_true",
        help="a row: A and B alone are sent, and the engine merges from a base on its GPU; 1x1, --engine plain",
    )  # fmt: skip
    parser.add_argument("--delta-mib", type=int, default=8192, help="weight_sync.delta_bytes of these rows")
    parser.add_argument("--kv-gib", type=int, help="of the engine's KV cache; 24, which an H100 lacks, if not given")
    parser.add_argument("--requests", type=int, default=256, help="at work in the engine meanwhile")
    parser.add_argument("--peer-updates", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.experts, args.hidden, args.width, args.vocab = 2, 8, 256, 128, 1000
        args.heads, args.head_dim, args.rank = 8, 32, 4
        args.requests, args.publishes, args.warm_up = min(args.requests, 4), 3, 1
        args.watermark_mib, args.delta_mib = [4, 16], 4
    args.no_peers |= args.colocate  # NCCL needs a GPU of its own for every rank of a group
    args.name = ("tiny-" if args.tiny else "") + args.plan
    args.name += "-colocated" if args.colocate else ""
    return args


def main() -> None:
    args = parse()
    facts = environment(args.commit)
    device = "cuda" if facts["gpus"] else "cpu"
    num_ranks, tp_size = map(int, args.plan.split("x"))
    num_gpus = max(num_ranks, tp_size) if args.colocate else num_ranks + tp_size
    if facts["gpus"] and len(facts["gpus"]) < num_gpus:
        sys.exit(f"--plan {args.plan} needs {num_gpus} GPUs, this host has {len(facts['gpus'])}")
    hf_config = model_config(args)
    base = EngineSpec(args.engine, hf_config, device, num_requests=args.requests, is_colocated=args.colocate)
    base = replace(base, delta_bytes=args.delta_mib * MIB if args.delta else 0)
    if args.kv_gib:
        base = replace(base, kv_cache_bytes=args.kv_gib << 30)
    engines = [base]
    if tp_size > 1:
        both = {"EP": replace(base, tp_size=tp_size, expert_parallel=True), "TP": replace(base, tp_size=tp_size)}
        if device == "cpu":  # vLLM 0.32's CPU worker dies in its first step with expert parallelism
            both["EP"] = replace(both["EP"], num_requests=0)
        engines = [spec for name, spec in both.items() if args.only in (None, name)]
    print(json.dumps(facts, indent=2), flush=True)
    report: dict[str, Any] = {"environment": facts, "model": base.hf_config, "lora_rank": args.rank, "plan": args.plan}
    report["is_colocated"] = args.colocate
    report |= {"peers_include": peers.__doc__, "engines": []}
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / f"weight_sync-{args.name}.json"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, num_ranks, device, folder)
        try:
            for number, spec in enumerate(engines):
                rows = rows_of(args, number == 0, args.out, spec.title)

                def keep(found: dict[str, Any], number: int = number) -> None:  # what comes after may fail
                    report["engines"][number:] = [found]
                    out.write_text(json.dumps(report, indent=2, default=str) + "\n")

                bench.measure(spec, rows, is_last=number == len(engines) - 1, keep=keep)
        finally:
            bench.close()
    show(report)
    print(f"written: {out}")
    plot(report, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
