"""A real pretrained model learns, in Slipstream and in TRL: held-out reward by step and by second, lengths, k3.

    python bench/real_model.py MODEL --rows trl dithered --seeds 0 1 2              one run after the other, on one GPU
    python bench/real_model.py MODEL --rows trl dithered --gpus 0 1 --per-gpu 3    runs beside each other: by step alone
    python bench/real_model.py MODEL --rows trl dithered --cpu --steps 2           does it work?
    python bench/real_model.py --plot --out FOLDER                                 table and picture of what is there

MODEL is a folder (examples/real_model/make_model.py); data and reward are examples/real_model's. Every run has one GPU,
which trainer and engine share, LoRA r=32 alpha 64 on all linears, AdamW with a constant rate of 1e-4, 16 groups of 16
responses a step at temperature 1, and evaluations on the same 128 held-out rows, sampled once each at temperature 1.
Rows differ from Slipstream's defaults by ROWS; `trl` is TRL 1.16 with its own defaults for the rest
(bench/loops/trl_learner.py; `pip install --no-deps trl==1.16.0` beside accelerate and datasets).

Seconds count from the command, start included. A step's `reward` is of prompts that were not trained on before, if
steps are fewer than an epoch. Every run writes FOLDER/ROW-seedN.json while it goes on; beside it lie metrics.jsonl and
startup.jsonl (ours) and the log.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from bench.loops.row_process import python_path  # noqa: E402
from bench.loops.trl_learner import Job  # noqa: E402
from examples.real_model.tasks import TASKS, write  # noqa: E402
from examples.real_model.train import MAX_TOKENS, options  # noqa: E402

ON_POLICY = ["algorithm.max_staleness_steps=0"]
TOKEN = [*ON_POLICY, "algorithm.normalization=token"]
TRL_CORRECTION = ["algorithm.correction=sequence_mis", "algorithm.correction_max=3"]
ROWS: dict[str, list[str]] = {
    "dithered": [],
    "nearest": ["weight_sync.rounding=nearest"],
    "slots": ["weight_sync.mode=adapter"],
    "merged_values": ["trainer.numerics.match=merged"],
    "masked": ["algorithm.mask_truncated=true"],
    "beta2": ["trainer.optim.betas=[0.9,0.95]"],
    "warm_up": ["trainer.optim.warmup_steps=10"],
    "on_policy": ON_POLICY,
    "on_policy_changes": [*ON_POLICY, f"weight_sync.delta_bytes={64 << 20}"],
    "on_policy_masked": [*ON_POLICY, "algorithm.mask_truncated=true"],
    "dr_grpo": [*ON_POLICY, "algorithm=dr_grpo"],
    "sequence": [*ON_POLICY, "algorithm.normalization=sequence"],
    "token": TOKEN,
    "token_stale": ["algorithm.normalization=token"],
    "token_masked": [*TOKEN, "algorithm.mask_truncated=true"],
    "token_nearest": [*TOKEN, "weight_sync.rounding=nearest"],
    "token_sequence_mis": [*TOKEN, *TRL_CORRECTION],
    "as_trl": [*TOKEN, *TRL_CORRECTION, "weight_sync.rounding=nearest"],
}
"""What each changes in Slipstream's defaults. `as_trl` divides, corrects and rounds as TRL does."""
TRL_ROWS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl_token_tis": {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
}
SHOWN_STEPS = (0, 25, 50, 75, 100)
NAMES = {
    "reward/mean": "reward", "rollout/response_tokens_mean": "tokens", "rollout/truncated_fraction": "truncated",
    "parity/k3": "k3", "parity/k3_stale": "k3_stale", "parity/floor_k3": "floor_k3", "eval/reward": "held_out",
    "optim/grad_norm": "grad_norm", "policy/entropy": "entropy", "step/total_s": "step_s",
}  # fmt: skip
"""Which metrics of metrics.jsonl a result keeps, and what they are called there."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs of a call share."""

    model: Path
    data: Path
    task: str
    steps: int
    out: Path
    scratch: Path
    is_cpu: bool
    is_beside: bool
    """Runs share a GPU: they take little of its memory."""
    extra: Sequence[str]
    ends_at: float
    """time.monotonic() after which nothing goes on."""


def command_of(plan: Plan, row: str, seed: int) -> list[str]:
    """The run's process."""
    name = f"{row}-seed{seed}"
    if row in TRL_ROWS:
        job = Job(
            model=str(plan.model),
            data=str(plan.data),
            rows=str(plan.scratch / name / "rows.jsonl"),
            adapters=str(plan.scratch / name / "adapter"),
            seed=seed,
            steps=plan.steps,
            eval_every=5,
            max_tokens=MAX_TOKENS[plan.task],
            groups=2 if plan.is_cpu else 16,
            group_size=4 if plan.is_cpu else 16,
            parts=8 if plan.is_beside else 1,
            is_cpu=plan.is_cpu,
            options=TRL_ROWS[row],
        )
        return [sys.executable, "-m", "bench.loops.trl_learner", json.dumps(asdict(job))]
    words = options("cpu" if plan.is_cpu else "one_gpu", plan.task, plan.model, plan.data)
    words += [
        f"run.seed={seed}", f"run.num_steps={plan.steps}", f"run.dir={plan.scratch / name}", "cluster.dashboard=false",
        "run.loggers=[]", "run.checkpoint_every_steps=0", *ROWS[row],
    ]  # fmt: skip
    if plan.is_beside:
        words.append("trainer.max_microbatch_tokens=4096")
    return [sys.executable, "-m", "slipstream.orchestrator.cli.main", "train", *words, *plan.extra]


def run(plan: Plan, row: str, seed: int, gpu: str | None) -> dict[str, Any]:
    """One run, to its end or the call's; its figures are written every few seconds."""
    name = f"{row}-seed{seed}"
    folder = plan.scratch / name
    folder.mkdir(parents=True)
    own = {"PYTHONPATH": python_path(), "VLLM_CACHE_ROOT": str(folder / "vllm")}  # nobody reads what another one writes
    if gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = gpu
    with socket.socket() as probe:  # TRL's process group listens at MASTER_PORT, 29500 unless told
        probe.bind(("127.0.0.1", 0))
        own["MASTER_PORT"] = str(probe.getsockname()[1])
    with (plan.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command_of(plan, row, seed), cwd=ROOT, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
        )
        written_at = 0.0
        while process.poll() is None and time.monotonic() < plan.ends_at:
            time.sleep(0.2)
            if time.monotonic() > written_at + 5:
                written_at = time.monotonic()
                collect(plan, row, seed, gpu, None)
        was_ended = process.poll() is None
        if was_ended:
            end(process)
    return collect(plan, row, seed, gpu, None if was_ended else process.returncode)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a run to end, and after some seconds no longer ask."""
    process.terminate()
    try:
        process.wait(timeout=8)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def collect(plan: Plan, row: str, seed: int, gpu: str | None, code: int | None) -> dict[str, Any]:
    """Write what a run has come to."""
    name = f"{row}-seed{seed}"
    points = trl_points(plan.scratch / name) if row in TRL_ROWS else our_points(plan.scratch / name, plan.out, name)
    found = {
        "row": row, "seed": seed, "task": plan.task, "gpu": gpu, "is_beside": plan.is_beside, "exit_code": code,
        "options": TRL_ROWS[row] if row in TRL_ROWS else [*ROWS[row], *plan.extra], "points": points,
    }  # fmt: skip
    (plan.out / f"{name}.json").write_text(json.dumps(found) + "\n")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that another process may be writing."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def our_points(folder: Path, out: Path, name: str) -> list[dict[str, Any]]:
    """A row of figures for each step of a run folder."""
    rows, starts = read_lines(folder / "latest" / "metrics.jsonl"), read_lines(folder / "latest" / "startup.jsonl")
    for file in ("metrics.jsonl", "startup.jsonl"):
        if (folder / "latest" / file).exists():
            shutil.copyfile(folder / "latest" / file, out / f"{name}.{file}")
    seconds = starts[0]["total_s"] if starts else 0.0
    points: list[dict[str, Any]] = []
    for row in rows:
        seconds += row["step/total_s"] or 0.0 if row["step"] else 0.0
        points.append({"step": row["step"], "s": seconds, **{own: row.get(key) for key, own in NAMES.items()}})
    return points


def trl_points(folder: Path) -> list[dict[str, Any]]:
    """The same of TRL's rows, of which a step with an evaluation has two."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_lines(folder / "rows.jsonl"):
        by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def near(points: list[dict[str, Any]], key: str, step: int, reach: int) -> float | None:
    """Mean of a figure over the steps within `reach` of one, if the run got so far."""
    values = [point[key] for point in points if abs(point["step"] - step) <= reach and point.get(key) is not None]
    return statistics.mean(values) if values and points[-1]["step"] >= step else None


def print_table(results: list[dict[str, Any]]) -> None:
    """One line per run: held-out reward around some steps, and what it took."""
    titles = [*(f"held out {step}" for step in SHOWN_STEPS), *(f"train {step}" for step in SHOWN_STEPS[1:])]
    titles += ["tokens", "cut off", "k3", "seconds"]
    print(f"{'':26}" + "".join(f"{title:>13}" for title in titles))
    for result in results:
        points = result["points"]
        if not points:
            print(f"{result['row']:20} {result['seed']:4}  nothing; exit code {result['exit_code']}")
            continue
        cells = [near(points, "held_out", step, 5 if step else 0) for step in SHOWN_STEPS]
        cells += [near(points, "reward", step, 5) for step in SHOWN_STEPS[1:]]
        last = points[-1]["step"]
        cells += [near(points, key, last, 5) for key in ("tokens", "truncated", "k3")]
        cells.append(points[-1]["s"])
        print(
            f"{result['row']:20} {result['seed']:4} "
            + "".join(f"{'-' if c is None else format(c, '.4g'):>13}" for c in cells)
        )


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Held-out reward by step and by second, length and k3 by step: a thin line per run, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(dict.fromkeys(result["row"] for result in results))
    panels = (
        ("held-out reward by step", "step", "held_out"),
        ("held-out reward by second, runs alone on a GPU", "s", "held_out"),
        ("tokens of a response by step", "step", "tokens"),
        ("k3 by step (one step late: with the drift of a step), mean of 5", "step", "k3"),
    )
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for axis, (title, across, up) in zip(axes.flat, panels, strict=True):
        axis.set_title(title)
        for number, row in enumerate(rows):
            # by second, others took the time of those beside each other
            runs = [one["points"] for one in results if one["row"] == row and not (across == "s" and one["is_beside"])]
            lines = [dict(line_of(points, across, up)) for points in runs]
            for line in lines:
                axis.plot(list(line), list(line.values()), color=f"C{number % 10}", linewidth=0.6, alpha=0.5)
            shared = sorted(set.intersection(*map(set, lines))) if lines else []
            means = [statistics.mean(line[place] for line in lines) for place in shared]
            axis.plot(shared, means, color=f"C{number % 10}", linewidth=2, label=f"{row} ({len(lines)})")
        if up == "k3":
            axis.set_yscale("log")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def line_of(points: list[dict[str, Any]], across: str, up: str) -> list[tuple[float, float]]:
    """What a run has of a panel; of k3 the mean of five, of older tokens where all are."""
    told = [(point[across], point.get(up)) for point in points]
    if up == "k3":
        told = [(point[across], point.get("k3") or point.get("k3_stale")) for point in points]
    line = [(place, value) for place, value in told if value is not None]
    if up != "k3":
        return line
    return [(line[i][0], statistics.mean(value for _, value in line[max(0, i - 4) : i + 1])) for i in range(len(line))]


def report(out: Path) -> None:
    """Table and picture of the results in a folder, and one file with all of them."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*-seed*.json"))]
    print_table(found)
    draw(found, out / "real_model.png")
    told = [{**result, "points": columns(result["points"])} for result in found]
    measured_on = json.loads((out / "environment.json").read_text())
    (out / "real_model.json").write_text(json.dumps({"environment": measured_on, "runs": told}) + "\n")


def columns(points: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Figures by name, to four digits."""
    names = dict.fromkeys(name for point in points for name in point)
    return {
        name: [None if (value := point.get(name)) is None else float(f"{value:.4g}") for point in points]
        for name in names
    }


def main() -> None:
    """Run the named rows with each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="folder of the model")
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        default=["trl", "dithered"],
        help=f"{', '.join([*TRL_ROWS, *ROWS])}; ROW:SEED is one run",
    )
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--data", type=Path, help="folder with the task's rows; default: they are made")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--gpus", nargs="+", default=["0"], help="cards for runs; each run has one")
    parser.add_argument("--per-gpu", type=int, default=1, help="runs at the same time on each")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many")
    parser.add_argument("--set", nargs="*", default=[], help="further options of our runs")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/real-model-runs"), help="folder for run folders")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "real_model")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--plot", action="store_true", help="draw what is in --out and end")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plot:
        report(args.out)
        return
    scratch = args.scratch / str(os.getpid())
    plan = Plan(
        model=args.model.resolve(),
        data=(args.data or write(args.task, scratch / args.task)).resolve(),
        task=args.task,
        steps=args.steps,
        out=args.out,
        scratch=scratch,
        is_cpu=args.cpu,
        is_beside=args.per_gpu > 1,
        extra=args.set,
        ends_at=time.monotonic() + args.seconds,
    )
    (args.out / "environment.json").write_text(json.dumps(environment(args.commit), indent=1) + "\n")
    cards: queue.Queue[str | None] = queue.Queue()
    for _ in range(args.per_gpu):
        for card in [None] if args.cpu else args.gpus:
            cards.put(card)

    def on_a_card(row: str, seed: int) -> None:
        card = cards.get()
        try:
            if time.monotonic() < plan.ends_at:
                print_table([run(plan, row, seed, card)])
        finally:
            cards.put(card)

    named = [row.partition(":") for row in args.rows]
    jobs = [(row, int(one)) for row, _, seed in named for one in ([seed] if seed else args.seeds)]
    with ThreadPoolExecutor(cards.qsize()) as pool:
        for future in [pool.submit(on_a_card, *job) for job in jobs]:
            future.result()
    report(args.out)


if __name__ == "__main__":
    main()
