"""Kimi-K2-Thinking, LoRA on everything: the whole model on 8 GPUs, or a slice on fewer, extrapolated to 8 x H200.

    python bench/kimi_slice.py                    the GPUs present; writes bench/results/kimi-slice-<n>gpu.json
    python bench/kimi_slice.py --full             8 GPUs: all 61 layers and 384 experts; kimi-full-8gpu.json
    python bench/kimi_slice.py --profile          and where a step's device time goes
    python bench/kimi_slice.py --tiny             two ranks on a CPU

The product's TrainerRank trains the model's true layers (hidden 7168, latent attention of 64 heads, a shared expert,
experts of 2048 in INT4, vocabulary 163,840, dense layer 0) with random weights. There are 48 experts per GPU and layer,
as with EP=8. Experts are parallel over the N GPUs present, so there are 48 N routed experts at top-8, and 8 x 8,192 /
48 = 1,365 rows per expert, at 8,192 tokens per GPU. A step is forward, backward (activation checkpointing) and AdamW
with 8-bit moments on bfloat16 adapters of r=16 (and r=8) on all projections. Routing is forced: drawn uniformly
("balanced"), or from a Zipf law whose fullest expert gets twice the mean. Sequences are four of 2,048 tokens ("one
sequence": one of 8,192, whose attention costs four times as much). Without --full, two depths give seconds per layer
and a constant. The rest is arithmetic: it is labelled an extrapolation, and all its assumptions are printed.
"""

import argparse
import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402

NUM_GPUS, NUM_MOE_LAYERS, TOP_K, HIDDEN, EXCHANGES = 8, 60, 8, 7168, 4
OTHERS, GOAL = 6600.0, 13000.0
"""Tokens/s: Trellis on 8 x H200 (Workshop Labs, 2026-03-12), and twice that, the goal."""
ASSUMED_LINK_GB_S = 350.0
"""Bytes per second that leave a GPU in an all-to-all, assumed if there is only one GPU. NVLink 4 has 450 GB/s."""


def cases(args: argparse.Namespace, world_size: int) -> list[Any]:
    """The cases to run for each LoRA rank: the whole model, or two depths of it."""
    from bench.training.kimi_rank import Case

    shallow, deep = args.layers
    common: dict[str, Any] = {
        "adapter_dtype": args.adapter_dtype,
        "state": args.state,
        "repeats": args.repeats,
        "is_tiny": args.tiny,
        "device": args.device,
        "experts_a_gpu": 4 if args.tiny else 48,
    }
    some = (args.tokens // args.sequences,) * args.sequences
    plain: dict[str, Any] = {"balanced": (some, None)}
    every = plain | {"zipf": (some, 2.0), "one sequence": ((args.tokens,), None)}
    if args.full:
        made = [Case("full", deep, args.rank, workloads=every, profile=args.profile, **common)]
        return made + [Case("other_full", deep, args.other_rank, workloads=plain, **common)] * bool(args.other_rank)
    made = [
        Case("shallow", shallow, args.rank, workloads=every, **common),
        Case("deep", deep, args.rank, workloads=every, profile=args.profile, **common),
    ]
    if args.other_rank:
        made.append(Case("other_shallow", shallow, args.other_rank, workloads=plain, **common))
        made.append(Case("other_deep", deep, args.other_rank, workloads=plain, **common))
    return made


def run_case(case: Any, world_size: int) -> dict[str, Any]:
    """Run one process per GPU, for this case only, because a second process group in one process would share state of
    torch, NCCL and the profiler with the first. If it fails: the results so far, and why; empty if there are none.
    """
    import torch.multiprocessing as mp

    from bench.training.kimi_rank import run_rank

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        try:
            mp.spawn(run_rank, (world_size, case, meeting, str(out)), nprocs=world_size)  # pyright: ignore[reportPrivateImportUsage]
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # pyright: ignore[reportPrivateImportUsage]
            print(f"{case.name}: {error}", flush=True)
            return json.loads(out.read_text()) | {"error": str(error)} if out.is_file() else {}
        return json.loads(out.read_text())


def extrapolate(
    shallow: dict[str, Any], deep: dict[str, Any], routing: str, world_size: int, tokens_a_gpu: int
) -> dict[str, Any]:
    """Seconds of a step of 60 expert layers on 8 GPUs, and bytes on each.

    t = constant + 60 * (layer * imbalance + 4 exchanges' missing bytes / bandwidth).
    """
    low, high = shallow["routings"][routing], deep["routings"][routing]
    layers = (shallow["case"]["num_moe_layers"], deep["case"]["num_moe_layers"])
    layer_s = (high["median_s"] - low["median_s"]) / (layers[1] - layers[0])
    constant_s = low["median_s"] - layers[0] * layer_s
    gb_s = (shallow | deep).get("all_to_all_gb_s", ASSUMED_LINK_GB_S)
    rows_bytes = tokens_a_gpu * TOP_K * HIDDEN * 2
    missing = (NUM_GPUS - 1) / NUM_GPUS - (world_size - 1) / world_size
    exchange_s = EXCHANGES * rows_bytes * missing / gb_s / 1e9
    imbalance = high["rank_max_over_mean_at_ep8"]
    step_s = constant_s + NUM_MOE_LAYERS * (layer_s * imbalance + exchange_s)
    return {
        "layer_s": layer_s,
        "constant_s": constant_s,
        "missing_exchange_s_a_layer": exchange_s,
        "all_to_all_gb_s": gb_s,
        "rank_max_over_mean": imbalance,
        "step_s": step_s,
        "tokens_per_s": NUM_GPUS * tokens_a_gpu / step_s,
        "memory_gb": extrapolated_memory(low["memory_gb"], high["memory_gb"], layers, world_size),
    }


def extrapolated_memory(
    low: dict[str, float], high: dict[str, float], layers: tuple[int, int], world_size: int
) -> dict[str, float]:
    """Each component, linear in the number of layers; FSDP2's shards scaled from N to 8 ranks."""
    made: dict[str, float] = {}
    for name in (name for name in high if name != "peak"):
        slope = (high[name] - low[name]) / (layers[1] - layers[0])
        made[name] = low[name] + slope * (NUM_MOE_LAYERS - layers[0])
    made["dense_weights"] *= world_size / NUM_GPUS
    made["peak"] = sum(made.values())
    return made


def add_extrapolations(report: dict[str, Any], args: argparse.Namespace, world_size: int) -> None:
    """Extrapolate for every LoRA rank for which both depths were measured."""
    measured = report["measured"]
    pairs = {f"r{args.rank}": ("shallow", "deep"), f"r{args.other_rank}": ("other_shallow", "other_deep")}
    report["extrapolated"] = {
        rank: {
            routing: extrapolate(measured[low], measured[high], routing, world_size, args.tokens)
            for routing in measured[high]["routings"]
            if routing in measured[low]["routings"]
        }
        for rank, (low, high) in pairs.items()
        if {low, high} <= measured.keys()
    }
    if report["extrapolated"]:
        report["assumptions"] = assumptions(world_size, report["extrapolated"])


def assumptions(world_size: int, report: dict[str, Any]) -> list[str]:
    """All assumptions of the extrapolation, in words."""
    link = report["r16"]["balanced"] if "r16" in report else next(iter(report.values()))["balanced"]
    source = "measured in this run" if world_size > 1 else "ASSUMED: one GPU exchanges nothing"
    return [
        f"experts: 48 per GPU and layer, {48 * world_size} in all here, not 384; the same rows per expert (1,365)",
        f"layers: a straight line through two depths, carried to 60 expert layers; dense layer 0, embedding, head and "
        f"their optimizer state are the constant ({link['constant_s']:.3f} s)",
        f"all-to-all: {EXCHANGES} exchanges a layer of {8192 * TOP_K * HIDDEN * 2 / 1e6:.0f} MB (a fifth runs beside "
        "a grouped product of the backward, which is longer, and is NOT counted); at EP=8 7/8 of them "
        f"leave the GPU, here {world_size - 1}/{world_size}; the difference is added at {link['all_to_all_gb_s']:.0f} "
        f"GB/s ({source}), without overlap",
        "the sort of received rows by expert and their way back (gathers of 0.9 GB) run under EP alone: "
        + ("measured in the layer" if world_size > 1 else "NOT in these figures"),
        "dense weights: FSDP2 over N ranks here, over 8 there; gathered bytes per layer go from "
        f"{(world_size - 1) / world_size:.2f} to 0.88 of 0.29 GB, which the slope "
        + ("has up to that difference" if world_size > 1 else "does NOT have"),
        f"router: its product has {48 * world_size} columns here, 384 there (0.05 TFLOP a pass), NOT rescaled",
        "imbalance: at EP=8 all wait for the fullest of 8 ranks; the whole layer's time is multiplied by its expected "
        f"rows over the mean (balanced {link['rank_max_over_mean']:.3f}), though attention would not wait",
        "optimizer: expert adapters (48 experts per GPU) scale with layers; dense adapters are sharded N ways here, 8 "
        "there, and not rescaled (against us)",
        "memory: components on straight lines, dense weights rescaled from N to 8 shards; NCCL's buffers and the "
        "allocator's slack are not in it",
    ]


def print_table(report: dict[str, Any]) -> None:
    """Print the extrapolated figures, then the measured ones."""
    if report["arguments"]["tiny"]:
        print("\n--tiny: the figures below only show that the script runs")
    print("\nEXTRAPOLATION to Kimi-K2-Thinking, 61 layers, 384 experts, 8 GPUs, 65,536 tokens per step")
    print(f"{'':6}{'workload':14}{'s/layer':>9}{'const s':>9}{'+a2a s':>9}{'step s':>8}{'tok/s':>8}{'/6,600':>8}"
          f"{'/13,000':>9}{'peak GB':>9}")  # fmt: skip
    for rank, routings in report["extrapolated"].items():
        for name, row in routings.items():
            peak = row["memory_gb"].get("peak", float("nan"))
            print(f"{rank:6}{name:14}{row['layer_s']:9.4f}{row['constant_s']:9.3f}"
                  f"{row['missing_exchange_s_a_layer']:9.4f}{row['step_s']:8.2f}{row['tokens_per_s']:8.0f}"
                  f"{row['tokens_per_s'] / OTHERS:8.2f}{row['tokens_per_s'] / GOAL:9.2f}{peak:9.1f}")  # fmt: skip
    for rank, routings in report["extrapolated"].items():
        parts = routings["balanced"]["memory_gb"].items()
        print(f"{rank} memory a GPU, GB: " + ", ".join(f"{name} {value:.1f}" for name, value in parts))
    print("assumptions:")
    for line in report["assumptions"]:
        print(f"  - {line}")


def print_full(report: dict[str, Any], world_size: int) -> None:
    print(f"\nMEASURED: {report['label']}")
    print(f"{'':6}{'workload':14}{'step s':>8}{'tok/s':>8}{'/6,600':>8}{'/13,000':>9}{'peak GB':>9}")
    for measured in report["measured"].values():
        for name, row in measured["routings"].items():
            tokens_per_s = world_size * report["arguments"]["tokens"] / row["median_s"]
            print(f"r{measured['case']['lora_rank']:<5}{name:14}{row['median_s']:8.2f}{tokens_per_s:8.0f}"
                  f"{tokens_per_s / OTHERS:8.2f}{tokens_per_s / GOAL:9.2f}"
                  f"{row['memory_gb'].get('peak', float('nan')):9.1f}")  # fmt: skip


def print_kernels(kernels: dict[str, Any]) -> None:
    total = sum(entry["ms"] for entry in kernels.values())
    print(f"\ndevice time of one step: {total:.0f} ms")
    for name, entry in sorted(kernels.items(), key=lambda item: -item[1]["ms"]):
        print(f"  {entry['ms']:9.1f} ms {entry['ms'] / total:6.1%} {entry['calls']:>7} x  {name}")
        for key, ms, calls in entry["longest"][:5]:
            print(f"        {ms:9.1f} ms {calls:>7} x  {key[:90]}")


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--layers", nargs=2, type=int, default=[6, 30], metavar=("SHALLOW", "DEEP"),
                        help="expert layers of the two depths, beside dense layer 0")  # fmt: skip
    parser.add_argument("--full", action="store_true", help="all expert layers, on 8 GPUs; no arithmetic")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--other-rank", type=int, default=8, help="0: none")
    parser.add_argument("--adapter-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--state", default="int8", choices=("int8", "bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, default=8192, help="a GPU and microbatch")
    parser.add_argument("--sequences", type=int, default=4, help="of equal length, packed into them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.full:
        args.layers = [NUM_MOE_LAYERS, NUM_MOE_LAYERS]
    if args.tiny:
        args.layers, args.tokens, args.repeats = [1, 2], 64, 2
    return args


def main() -> None:
    args = parse()
    import torch

    args.device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    world_size = torch.cuda.device_count() if args.device == "cuda" else 2
    if args.full and world_size != NUM_GPUS and not args.tiny:
        sys.exit(f"--full needs {NUM_GPUS} GPUs, this host has {torch.cuda.device_count()}; leave it out for a slice")
    label = f"{world_size}gpu" if args.device == "cuda" else "cpu"
    kind = "full" if args.full else "slice"
    out: Path = args.out or RESULTS / f"kimi-{kind}-{label}.json"
    given = {k: v for k, v in vars(args).items() if k not in ("out", "commit")}
    report: dict[str, Any] = {
        "label": f"{args.layers[1] + 1} layers, {(4 if args.tiny else 48) * world_size} experts, {world_size} ranks"
        if args.full
        else "EXTRAPOLATION: a slice of the model on the GPUs present, carried to 61 layers on 8 GPUs",
        "environment": environment(args.commit),
        "arguments": given,
        "measured": {},
    }
    print(json.dumps(report["environment"]), flush=True)
    measured = report["measured"]
    wanted = cases(args, world_size)
    for case in wanted:
        if result := run_case(case, world_size):
            measured[case.name] = result
            add_extrapolations(report, args, world_size)
            write_report(out, report)  # kept even if the next case fails
    if not measured:
        sys.exit("nothing was measured: see the error above")
    if args.full:
        print_full(report, world_size)
    elif report["extrapolated"]:
        print_table(report)
    for case in measured.values():
        if case.get("kernels"):
            print_kernels(case["kernels"])
    print(f"written: {out}")
    if failed := [case.name for case in wanted if "error" in measured.get(case.name, {"error": ""})]:
        sys.exit(f"{', '.join(failed)} failed: see the errors above")


if __name__ == "__main__":
    main()
