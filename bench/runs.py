"""Whole runs, from start to end, and figures from their metrics: the quick start, its two controls, the GPU presets.

    python bench/runs.py quickstart no_publish shuffled       on a CPU
    python bench/runs.py quickstart_gpu qwen3_moe_2gpu        on a host with 2 GPUs
    python bench/runs.py quickstart --times 60                does each of them end well, and how far apart are they?

A control is the quick start without what is tested: `no_publish` never sends a trained version to the engines,
`shuffled` permutes advantages within each group. Neither may learn. `flat_engine_none` and `flat_engine_tis` have a
mismatch of trainer and engine, without and with a correction (docs/parity.md). `algorithm_<preset>` is the quick start
with that preset (docs/algorithms.md). `uneven_on_policy` and
`uneven_staleness_2` have engines whose groups take 0.5 s at the median and up to 4 s (docs/staleness.md). Figures are
medians over the steps after the first two (warm-up). Prints its environment and a table; writes
bench/results/runs-<device>.json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.controls import SHUFFLED  # noqa: E402
from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402

STALE = ["algorithm.max_staleness_steps=1"]
"""Without it the ratio to the engine is 1, so that no bound and no gate acts."""
ALGORITHMS = {
    "grpo": [],
    "grpo_minibatches": [],
    "dapo": STALE,
    "dr_grpo": [],
    "rloo": [],
    "maxrl": [],
    "reinforce_pp": [],
    "reinforce_pp_baseline": [],
    "gspo": STALE,
    "cispo": STALE,
    "sapo": STALE,
}
"""Presets of conf/algorithm, as they are but for the quick start's sizes."""
SCENARIOS = {
    "quickstart": ["experiment=quickstart"],
    "no_publish": ["experiment=quickstart"],
    "shuffled": ["experiment=quickstart", SHUFFLED],
    "flat_engine_none": ["experiment=quickstart", "rollout.eval.temperature=0", "algorithm.correction=none"],
    "flat_engine_tis": ["experiment=quickstart", "rollout.eval.temperature=0", "algorithm.correction=tis"],
    **{
        f"algorithm_{name}": ["experiment=quickstart", f"algorithm={name}", *words]
        for name, words in ALGORITHMS.items()
    },
    "async": ["experiment=quickstart", "algorithm.max_staleness_steps=2"],
    "uneven_on_policy": ["experiment=quickstart", "rollout.max_concurrent_groups=24"],
    "uneven_staleness_2": [
        "experiment=quickstart",
        "rollout.max_concurrent_groups=24",
        "algorithm.max_staleness_steps=2",
    ],
    "quickstart_gpu": ["experiment=quickstart_gpu"],
    "quickstart_one_gpu": ["experiment=quickstart_one_gpu"],
    "qwen3_moe_2gpu": ["experiment=qwen3_moe_2gpu"],
}
WARM_UP_STEPS = 2
REPEATED = ("wall_s", "eval_reward_first", "eval_reward_last")
"""Figures of each run with --times."""
ENGINES = {"flat_engine": "tests/fakes/flat_engine", "uneven": "tests/fakes/uneven_engine"}
"""By the beginning of a scenario's name, a folder that begins the PYTHONPATH of its run and changes its engines."""


def run(name: str, folder: Path, extra: list[str]) -> dict[str, Any]:
    """One scenario. Returns its figures."""
    environment = dict(os.environ)
    for prefix, changed in ENGINES.items():
        if name.startswith(prefix):
            paths = (str(ROOT / changed), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
            environment["PYTHONPATH"] = os.pathsep.join(paths)
    run_folder, wall_s = train(name, [*SCENARIOS[name], *extra], folder, environment)
    return {"wall_s": wall_s, **figures(read_rows(run_folder))}


def run_again(name: str, folder: Path, extra: list[str]) -> dict[str, Any]:
    """One of many runs of a scenario: its seconds and rewards, or how it failed."""
    try:
        found = run(name, folder, extra)
    except subprocess.CalledProcessError as error:
        return {"failed": error.returncode}
    return {figure: found[figure] for figure in REPEATED}


def train(name: str, words: list[str], folder: Path, environment: dict[str, str] | None = None) -> tuple[Path, float]:
    """One run through the command line, in its own process. Returns its run folder and the command's seconds."""
    started = time.monotonic()
    module = "bench.controls" if name == "no_publish" else "slipstream.orchestrator.cli.main"
    command = [sys.executable, "-m", module, "train", *words, f"run.dir={folder}", f"run.name={name}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return (folder / "latest").resolve(), time.monotonic() - started


def read_rows(run_folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run, from row 0."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and extremes of a metrics.jsonl."""
    steps = [row for row in rows if row["step"] > WARM_UP_STEPS]

    def values(key: str) -> list[float]:
        return [row[key] for row in steps if row.get(key) is not None]

    def median(key: str) -> float | None:
        return statistics.median(values(key)) if values(key) else None

    evals = [row["eval/reward"] for row in rows if row.get("eval/reward") is not None]
    publish_s, num_bytes = median("sync/total_s"), median("sync/bytes")
    write_s = median("sync/write_s")
    return {
        "num_steps": rows[-1]["step"],
        "eval_reward_first": evals[0] if evals else None,
        "eval_reward_last": evals[-1] if evals else None,
        "all_steps_s": sum(row["step/total_s"] for row in rows[1:]),
        "step_s": median("step/total_s"),
        "wait_s": median("rollout/wait_s"),
        "publish_s": publish_s,
        "prepare_s": median("sync/prepare_s"),
        "write_s": write_s,
        "verify_s": median("sync/verify_s"),
        "pause_s": median("sync/pause_s"),
        "publish_bytes": num_bytes,
        "publish_gb_per_s": num_bytes / publish_s / 1e9 if publish_s and num_bytes else None,
        "write_gb_per_s": num_bytes / write_s / 1e9 if write_s and num_bytes else None,
        "peak_bytes_max": max(values("sync/peak_bytes"), default=None),
        "watermark_bytes": median("sync/watermark_bytes"),
        "k3_max": max(values("parity/k3"), default=None),
        "k3_median": median("parity/k3"),
        "clip_fraction": statistics.mean(values("loss/clip_fraction")) if values("loss/clip_fraction") else None,
        "updates": median("optim/updates"),
        "entropy_first": steps[0].get("policy/entropy") if steps else None,
        "entropy_last": steps[-1].get("policy/entropy") if steps else None,
        "rollout_tokens_per_s": median("rollout/tokens_per_s"),
        "trainer_tokens_per_s_per_rank": median("trainer/tokens_per_s_per_rank"),
    }


def print_spread(name: str, each: list[dict[str, Any]]) -> None:
    """How many ended well, and of these the smallest, the median and the largest of each figure."""
    good = [one for one in each if "failed" not in one]
    print(f"{name}: {len(good)} of {len(each)} ended well")
    for figure in REPEATED if good else ():
        values = [one[figure] for one in good]
        print(f"{figure:32}{min(values):>10.4g}{statistics.median(values):>10.4g}{max(values):>10.4g}")


def main() -> None:
    """Run the named scenarios one after the other."""
    parser = command_line(__doc__)
    parser.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS))
    parser.add_argument("--set", nargs="*", default=[], help="further options for every run, e.g. run.num_steps=5")
    parser.add_argument("--times", type=int, default=1, help="so many runs of each, and of them REPEATED alone")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(args.commit), "runs": {}}
    print(json.dumps(report["environment"], indent=2))
    device = "gpu" if report["environment"]["gpus"] else "cpu"
    file = f"runs-{device}.json" if args.times == 1 else f"runs-{args.times}-{device}.json"
    out: Path = args.out or RESULTS / file
    if out.exists():  # keep scenarios that were measured on the same commit
        before = json.loads(out.read_text())
        if before["environment"] == report["environment"]:
            report["runs"] = before["runs"]
    if args.times > 1:
        for name in args.scenarios:
            each: list[dict[str, Any]] = report["runs"].setdefault(name, [])
            while len(each) < args.times:
                with tempfile.TemporaryDirectory() as folder:
                    each.append(run_again(name, Path(folder), args.set))
                write_report(out, report)
            print_spread(name, each)
        return
    for name in args.scenarios:
        with tempfile.TemporaryDirectory() as folder:
            report["runs"][name] = run(name, Path(folder), args.set)
        write_report(out, report)
    names = list(report["runs"])
    print(f"{'':32}" + "".join(f"{name:>18}" for name in names))
    for key in report["runs"][names[0]]:
        cells = [report["runs"][name][key] for name in names]
        print(f"{key:32}" + "".join(f"{'-' if c is None else format(c, '.4g'):>18}" for c in cells))
    print(f"written: {out}")


if __name__ == "__main__":
    main()
