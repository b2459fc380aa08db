"""What an evaluation costs the steps of a run: the quick start without one, with awaited ones, and with ones beside it.

    python bench/evals.py      about a quarter of an hour on two cores

One trainer rank and one engine, each with one thread: trainer and engine have a core of their own, as they have GPUs.
Every 16 steps 8 responses of each of the 96 held-out prompts are sampled: twice as many as a step of training samples.
Beside training they take a quarter of what engines decode for it, so an evaluation goes on for some steps, about
half of all. Of those, the table has how much longer they take than steps without an evaluation in the same run, beside
the most that sharing the engine may cost: evaluated tokens over trained tokens of these steps. Figures of a run are
medians over steps after the first two; each run is repeated, and the table has the median over the repeats with the
range. Prints its environment and a table; writes bench/results/evals-cpu.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from bench.runs import WARM_UP_STEPS, read_rows, train  # noqa: E402

ONE_OF_EACH = ["trainer.num_ranks=1", "trainer.ep_size=1", "rollout.num_workers=1"]
NUM_PROMPTS, SAMPLES = 96, 8
EVALUATED = ["run.eval_every_steps=16", f"run.eval_samples_per_prompt={SAMPLES}"]
SCENARIOS = {"none": ["data.eval_path=null"], "awaited": EVALUATED, "beside": [*EVALUATED, "run.eval_beside=true"]}


def under_evaluation(rows: list[dict[str, Any]]) -> set[int]:
    """Steps during which an evaluation went on: from the one after that which it is of to the one in which it ended."""
    steps: set[int] = set()
    for row in rows:
        if row["eval/step"] is not None:
            steps |= set(range(row["eval/step"] + 1, row["step"] + 1))
    return steps


def figures(rows: list[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """The figures of one run."""
    steps = [row for row in rows if row["step"] > WARM_UP_STEPS]
    during = under_evaluation(rows)
    seconds = {row["step"]: row["step/total_s"] - (row["eval/wait_s"] or 0.0) for row in steps}
    own = [value for step, value in seconds.items() if step not in during]
    shared = [value for step, value in seconds.items() if step in during]
    evaluations = [row for row in rows if row["eval/step"] is not None and row["step"] > row["eval/step"]]
    trained = sum(row["rollout/tokens_per_s"] * row["step/total_s"] for row in steps if row["step"] in during)
    evaluated = len(evaluations) * NUM_PROMPTS * SAMPLES * 4  # tokens of a response, exactly
    return {
        "wall_s": wall_s,
        "all_steps_s": sum(row["step/total_s"] for row in rows[1:]),
        "step_s": statistics.median(own),
        "step_s_during_evaluation": statistics.median(shared) if shared else None,
        "longer_by": statistics.median(shared) / statistics.median(own) - 1 if shared else None,
        "evaluated_over_trained_tokens": evaluated / trained if trained else None,
        "steps_of_an_evaluation": len(during) / len(evaluations) if evaluations else None,
        "waited_s": sum(row["eval/wait_s"] or 0.0 for row in rows[1:]),
        "evaluation_s": statistics.median(row["eval/total_s"] for row in rows if row["eval/total_s"] is not None)
        if any(row["eval/total_s"] is not None for row in rows)
        else None,
        "version_spread_max": max((row["eval/version_spread"] or 0 for row in rows), default=0),
        "reward_last": rows[-1]["reward/mean"],
        "pass_at_4_last": rows[-1].get("eval/pass_at_4"),
        "pass_at_4_se_last": rows[-1].get("eval/pass_at_4_se"),
    }


def told(values: list[float | None]) -> str:
    """Median and range, as the table has them."""
    known = sorted(value for value in values if value is not None)
    return f"{statistics.median(known):.3g} ({known[0]:.3g}..{known[-1]:.3g})" if known else "-"


def main() -> None:
    """Run the three, one after the other, again and again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "evals-cpu.json")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SCENARIOS}
    report = {"environment": environment(), "steps": args.steps, "runs": found}
    print(json.dumps(report["environment"], indent=2))
    common = ["experiment=quickstart", *ONE_OF_EACH, f"run.num_steps={args.steps}", "run.checkpoint_every_steps=0"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(args.repeats):
        for name, words in SCENARIOS.items():
            with tempfile.TemporaryDirectory() as folder:
                run_folder, wall_s = train(name, [*common, "cluster.dashboard=false", *words], Path(folder), one_thread)
                found[name].append(figures(read_rows(run_folder), wall_s))
            args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'':32}" + "".join(f"{name:>24}" for name in SCENARIOS))
    for key in found["none"][0]:
        print(f"{key:32}" + "".join(f"{told([row[key] for row in rows]):>24}" for rows in found.values()))
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
