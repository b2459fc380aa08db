"""A `verifiers` environment trains: held-out reward before and after, and a control (docs/agents.md).

    python3 -m venv ~/verifiers && ~/verifiers/bin/pip install verifiers==0.4.0
    python bench/verifiers_game.py --python ~/verifiers/bin/python                some minutes on two cores

Both runs are 50 steps of the agent_game preset with one trainer rank and one engine, whose episodes are played by
examples/verifiers/letters_env.py, in the interpreter of verifiers. `shuffled` permutes advantages within each group and
may not learn. Held-out games have digits that no other game has. Prints and writes bench/results/verifiers-cpu.json;
runs of the same commit stay in it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.controls import SHUFFLED  # noqa: E402
from bench.environment import environment  # noqa: E402
from bench.runs import read_rows, train  # noqa: E402

EXAMPLE = ROOT / "examples" / "verifiers"
TASKSET = "letters_env"
NUM_HELD_OUT = 64
"""The taskset's default: its last games."""
RUNS = {"learns": [], "shuffled": [SHUFFLED]}


def write_rows(python: str, folder: Path) -> list[str]:
    """The taskset's rows, by worker.py. Returns the options that name them."""
    command = [python, str(EXAMPLE / "worker.py"), TASKSET, "--rows"]
    rows = subprocess.run(command, cwd=EXAMPLE, check=True, capture_output=True, text=True).stdout.splitlines(True)
    train_path, held_out_path = folder / "train.jsonl", folder / "held_out.jsonl"
    train_path.write_text("".join(rows[:-NUM_HELD_OUT]))
    held_out_path.write_text("".join(rows[-NUM_HELD_OUT:]))
    return [f"data.path={train_path}", f"data.eval_path={held_out_path}"]


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the episodes of a run were, and what they brought."""
    steps = rows[1:]
    evals = {row["step"]: row["eval/reward"] for row in rows if row.get("eval/reward") is not None}
    return {
        "num_steps": rows[-1]["step"],
        "held_out_reward": evals,
        "train_reward_first": steps[0]["reward/mean"],
        "train_reward_last": steps[-1]["reward/mean"],
        "step_s": statistics.median(row["step/total_s"] for row in steps),
        "k3_max": max(row["parity/k3"] for row in steps),
        "turns_mean": statistics.mean(row["rollout/turns_mean"] for row in steps),
        "branches_mean": statistics.mean(row["rollout/branches_mean"] for row in steps),
        "failures": sum(row["reward/failures"] for row in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=list(RUNS), help=f"of {', '.join(RUNS)}; default both")
    parser.add_argument("--python", required=True, help="the interpreter with verifiers")
    parser.add_argument("--set", nargs="*", default=[], help="further options for every run, e.g. run.num_steps=5")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "verifiers-cpu.json")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "runs": {}}
    if args.out.exists():  # keep the other run of the same commit
        before = json.loads(args.out.read_text())
        if before["environment"] == report["environment"]:
            report["runs"] = before["runs"]
    variables = {"VERIFIERS_PYTHON": args.python, "VERIFIERS_TASKSET": TASKSET}
    for name in args.runs:
        with tempfile.TemporaryDirectory() as folder:
            words = [
                *("experiment=agent_game", "trainer.num_ranks=1", "trainer.ep_size=1", "rollout.num_workers=1"),
                *write_rows(args.python, Path(folder)),
                f"rollout.agent={EXAMPLE / 'agent.py'}:play",
                f"rollout.episodes.env=[{','.join(variables)}]",
                *("run.num_steps=50", "run.eval_every_steps=25", "run.checkpoint_every_steps=0"),
                *RUNS[name],
                *args.set,
            ]
            run_folder, wall_s = train(name, words, Path(folder) / "run", {**os.environ, **variables})
            report["runs"][name] = {"set": args.set, "wall_s": wall_s, **figures(read_rows(run_folder))}
            args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["runs"], indent=2))


if __name__ == "__main__":
    main()
