"""Sums of several steps, learned from nothing: both stages in a row, for several seeds, with variants and controls.

    python bench/arithmetic.py grpo no_publish shuffled --seeds 0 1 2      on a CPU
    python bench/arithmetic.py --gpu grpo staleness_1 staleness_4          on a host with 2 GPUs
    python bench/arithmetic.py --gpu --one-gpu --jobs 4 grpo --seeds 0 1   what is learned, not how fast, on one GPU

    make_arithmetic.py --> arithmetic_sft (once per seed) --> merged/ --> arithmetic_grpo (each row, each seed)

Stage 1 teaches a random MoE to work a sum step by step, from demonstrations of which a known share of steps is wrong
(bench/make_arithmetic.py); stage 2 is GRPO with LoRA from there, and sees answers alone. Every row starts from the same
taught model of its seed. `no_publish` and `shuffled` are controls: neither may learn. Held-out rewards are shares of
right answers to sums that no stage has seen, sampled at temperature 1. `adapter` needs GPU engines, or --dense.

Prints its environment and a table; writes bench/results/arithmetic-<device>.json with every curve and some responses,
and a picture of the curves beside it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench import runs  # noqa: E402
from bench.controls import SHUFFLED  # noqa: E402
from bench.environment import environment  # noqa: E402

AHEAD = "rollout.max_concurrent_groups=80"
"""Groups in flight over all workers, for five batches of 16: what a staleness of 4 lets be sampled ahead."""
ROWS = {
    "grpo": [],
    "no_publish": [],
    "shuffled": [SHUFFLED],
    "dapo": ["algorithm=dapo"],
    "dr_grpo": ["algorithm=dr_grpo"],
    "rloo": ["algorithm=rloo"],
    "staleness_1": ["algorithm.max_staleness_steps=1", AHEAD],
    "staleness_4": ["algorithm.max_staleness_steps=4", AHEAD],
    "no_correction": ["algorithm.correction=none"],
    "staleness_1_no_correction": ["algorithm.max_staleness_steps=1", AHEAD, "algorithm.correction=none"],
    "staleness_4_no_correction": ["algorithm.max_staleness_steps=4", AHEAD, "algorithm.correction=none"],
    "adapter": ["weight_sync.mode=adapter"],
}
"""What each row changes in the preset of stage 2, which is GRPO, on-policy, merged, with a truncated importance
weight."""
TABLE = {
    "held-out before": "eval_reward_first",
    "held-out after": "eval_reward_last",
    "steps until 0.9": "steps_to_0.9",
    "command, s": "wall_s",
    "all steps, s": "all_steps_s",
    "response tokens": "response_tokens",
    "entropy after": "entropy_last",
    "k3, median": "k3_median",
    "staleness, mean": "staleness_mean",
    "publish, s": "publish_s",
}
QUIET = ["cluster.dashboard=false", "run.loggers=[]"]
ONE_GPU = [
    "cluster.share_gpu=true", "weight_sync.transport=auto", f"rollout.kv_cache_bytes={6 << 30}",
    "rollout.gpu_memory_utilization=0.1",
]  # fmt: skip
"""Options of stage 2 with --one-gpu. The KV cache holds 512 responses of 240 tokens."""
NUM_SAMPLES = 4


def teach(seed: int, folder: Path, suffix: str, extra: list[str]) -> dict[str, Any]:
    """Stage 1. Its figures; the taught model is in folder/latest/merged."""
    words = [f"experiment=arithmetic_sft{suffix}", *QUIET, f"run.seed={seed}", *extra]
    run_folder, wall_s = runs.train("sft", words, folder)
    rows = runs.read_rows(run_folder)
    curve = [[row["step"], row["eval/nll"]] for row in rows if row.get("eval/nll") is not None]
    return {
        "wall_s": wall_s,
        "num_steps": rows[-1]["step"],
        "all_steps_s": sum(row["step/total_s"] for row in rows[1:]),
        "nll_curve": curve,
    }


def reinforce(name: str, seed: int, model: Path, folder: Path, suffix: str, extra: list[str]) -> dict[str, Any]:
    """Stage 2, as a row changes it."""
    words = [
        f"experiment=arithmetic_grpo{suffix}",
        *QUIET,
        f"run.seed={seed}",
        f"model.path={model}",
        *ROWS[name],
        *extra,
    ]
    run_folder, wall_s = runs.train(name, words, folder)
    rows = runs.read_rows(run_folder)
    samples = [json.loads(line) for line in (run_folder / "samples.jsonl").read_text().splitlines()]
    held_out = [sample for sample in samples if sample["kind"] == "held-out"]
    return {"wall_s": wall_s, **curves(rows, num_responses(run_folder)), "samples": told(held_out)}


def num_responses(run_folder: Path) -> int:
    """Responses of one batch."""
    import yaml

    algorithm = yaml.safe_load((run_folder / "config.yaml").read_text())["algorithm"]
    return algorithm["groups_per_step"] * algorithm["group_size"]


def curves(rows: list[dict[str, Any]], responses_per_step: int) -> dict[str, Any]:
    """Figures of runs.py, and points of the picture: [step, seconds of all steps, response tokens, held-out reward]."""
    points: list[list[float]] = []
    seconds = tokens = 0.0
    for row in rows:
        if row["step"] > 0:
            seconds += row["step/total_s"]
            tokens += (row["rollout/response_tokens_mean"] or 0) * responses_per_step
        if row.get("eval/reward") is not None:
            points.append([row["step"], seconds, tokens, row["eval/reward"]])
    staleness = [row["staleness/mean"] for row in rows if row.get("staleness/mean") is not None]
    return {
        **runs.figures(rows),
        "steps_to_0.9": next((step for step, *_, reward in points if reward > 0.9), None),
        "response_tokens": tokens,
        "staleness_mean": statistics.mean(staleness) if staleness else None,
        "curve": points,
        "training_rewards": [row["reward/mean"] for row in rows[1:]],
    }


def told(held_out: list[dict[str, Any]]) -> list[list[str]]:
    """[when, prompt, response] of some held-out responses before the first step and after the last."""
    last = held_out[-1]["step"]
    return [
        [f"step {step}", sample["prompt"], sample["response"]]
        for step in (0, last)
        for sample in [sample for sample in held_out if sample["step"] == step][:NUM_SAMPLES]
    ]


def print_table(report: dict[str, Any]) -> None:
    """One line per row: the range over seeds of each figure."""
    print(f"{'':28}" + "".join(f"{title:>18}" for title in TABLE))
    for name, by_seed in report["rows"].items():
        cells = []
        for key in TABLE.values():
            values = sorted(row[key] for row in by_seed.values() if row[key] is not None)
            ends = dict.fromkeys(f"{value:.3g}" for value in (values[:1] + values[-1:]))
            cells.append("..".join(ends) + (f" ({len(values)}/{len(by_seed)})" if len(values) < len(by_seed) else ""))
        print(f"{name:28}" + "".join(f"{cell:>18}" for cell in cells))
    for name, by_seed in report["rows"].items():
        seed, row = next(iter(by_seed.items()))
        print(
            f"\n{name}, seed {seed}:",
            *(f"  {when:9} {prompt}  {said}" for when, prompt, said in row["samples"]),
            sep="\n",
        )


def draw(report: dict[str, Any], picture: Path) -> None:
    """Held-out curves: stage 1 by step, stage 2 by step and by time. A colour is a row, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    taught, by_step, by_time = figure.subplots(1, 3)
    for seed, row in report["taught"].items():
        taught.plot(*zip(*row["nll_curve"], strict=True), label=f"seed {seed}", marker="o", markersize=3)
    for number, (name, by_seed) in enumerate(report["rows"].items()):
        for index, row in enumerate(by_seed.values()):
            steps, seconds, _, rewards = zip(*row["curve"], strict=True)
            style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "linewidth": 1.3}
            style["label"] = name if index == 0 else None
            by_step.plot(steps, rewards, **style)
            by_time.plot(seconds, rewards, **style)
    titles = ("stage 1: held-out nll, nats per token", "stage 2: held-out reward", "stage 2: held-out reward")
    for panel, title, axis in zip(
        (taught, by_step, by_time), titles, ("step", "step", "seconds of steps"), strict=True
    ):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(axis)
        panel.grid(alpha=0.3)
    taught.legend(fontsize=8)
    figure.legend(*by_step.get_legend_handles_labels(), fontsize=8, loc="outside right center")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Make the data, teach once per seed, run the named rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", nargs="*", choices=[*ROWS, []], help="for every seed; default: grpo no_publish shuffled"
    )
    parser.add_argument("--gpu", action="store_true", help="the GPU presets; without it, the CPU's")
    parser.add_argument("--one-gpu", action="store_true", help="trainer and engine of every run on the same GPU")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; their seconds mean little then")
    parser.add_argument("--dense", action="store_true", help="a dense model instead of experts (CPU presets)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of weights, order of rows, and sampling")
    parser.add_argument("--once", nargs="*", default=[], choices=ROWS, help="further rows, of the first seed alone")
    parser.add_argument("--set-sft", nargs="*", default=[], help="further options of stage 1, e.g. run.num_steps=5")
    parser.add_argument("--set", nargs="*", default=[], help="further options of every run of stage 2")
    parser.add_argument("--out", type=Path, help="the JSON; default bench/results/arithmetic-<device>.json")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the JSON of --out and end")
    args = parser.parse_args()
    if args.plot:
        draw(json.loads(args.out.read_text()), args.plot)
        return
    suffix = "_gpu" if args.gpu else ""
    report: dict[str, Any] = {"environment": environment(args.commit), "taught": {}, "rows": {}}
    print(json.dumps(report["environment"], indent=2))
    device = ("gpu" if args.gpu else "cpu") + ("-dense" if args.dense else "")
    out: Path = args.out or ROOT / "bench" / "results" / f"arithmetic-{device}.json"
    taught_words = [*(["model=tiny_qwen3"] if args.dense else []), *args.set_sft]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make = [sys.executable, str(ROOT / "bench" / "make_arithmetic.py"), "--out", str(folder / "data")]
        subprocess.run([*make, *(["--gpu"] if args.gpu else [])], check=True)
        data = [f"data.path={folder}/data/train.jsonl", f"data.eval_path={folder}/data/heldout.jsonl"]
        words = [*data, *(ONE_GPU if args.one_gpu else []), *args.set]
        rows = args.rows or ["grpo", "no_publish", "shuffled"]
        plan = [(seed, name) for seed in args.seeds for name in rows]
        plan += [(args.seeds[0], name) for name in args.once]
        with ThreadPoolExecutor(args.jobs) as pool:
            teaching = {
                seed: pool.submit(teach, seed, folder / f"sft-{seed}", suffix, [*data, *taught_words])
                for seed in args.seeds
            }
            report["taught"] = {str(seed): future.result() for seed, future in teaching.items()}
            learning = {}
            for seed, name in plan:
                model = folder / f"sft-{seed}" / "latest" / "merged"
                row = pool.submit(reinforce, name, seed, model, folder / f"{name}-{seed}", suffix, words)
                learning[row] = name, str(seed)
            for row in as_completed(learning):
                name, seed_told = learning[row]
                report["rows"].setdefault(name, {})[seed_told] = row.result()
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(report, indent=1) + "\n")
                draw(report, out.with_suffix(".png"))
    print_table(report)
    print(f"written: {out}, {out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
