"""What `slipstream plan` says of the presets that are made to be launched, as the table of docs/launching.md.

python bench/recipes.py             plans all of them; minutes the first time, when layouts are recorded
python bench/recipes.py FILE ...    from what `slipstream plan experiment=... --json` printed into these files
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("qwen3_30b_a3b_2gpu", "qwen3_30b_a3b_2h200", "qwen3_30b_a3b_8gpu", "kimi_k2_thinking_32gpu")
COLUMNS = (
    "preset",
    "machines",
    "trainer",
    "engines",
    "trainer GPU, GB",
    "rollout GPU, GB",
    "a publish moves, GB",
    "a publish takes, ms",
)


def plan(experiment: str) -> dict[str, Any]:
    """The report of one preset."""
    command = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "plan", f"experiment={experiment}", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def row(experiment: str, report: dict[str, Any]) -> list[str]:
    """One row of the table."""
    cluster, memory = report["cluster"], report["memory_estimate"]
    trainer, rollout = memory["trainer_gpu"], memory["rollout_gpu"]
    held = sum(trainer[part] for part in ("weights", "adapters", "gradients", "optimizer", "reference", "publish"))
    return [
        f"`{experiment}`",
        str(cluster["nodes"]),
        f"{cluster['trainer_ranks']} ranks, EP{cluster['ep_size']}",
        f"{cluster['engines']} of {cluster['tp_size']} GPUs",
        f"{held / 1e9:.1f}",
        f"{(rollout['weights'] + rollout['slots']) / 1e9:.1f}",
        f"{report['plan']['bytes'] / 1e9:.1f}",
        f"{report['predicted_s']['total'] * 1e3:.0f}",
    ]


def main() -> None:
    files = {Path(name).stem.removeprefix("plan-"): Path(name) for name in sys.argv[1:]}
    reports = {
        experiment: json.loads(files[experiment].read_text()) if files else plan(experiment) for experiment in RECIPES
    }
    for cells in [COLUMNS, ["---"] * len(COLUMNS), *(row(name, report) for name, report in reports.items())]:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
