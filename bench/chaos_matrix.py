"""What a run outlives: each victim at each moment of `slipstream chaos`, on the quick start's model.

    python bench/chaos_matrix.py                  every plan that is not done yet
    python bench/chaos_matrix.py trainer taught   these
    sudo unshare --mount sh -c 'mount -t tmpfs -o size=600m tmpfs /dev/shm && mount -t tmpfs -o size=500m tmpfs /mnt &&
        python bench/chaos_matrix.py fill --folder /mnt'

A plan is a run with several events. After each plan the run's files are checked: every prompt of an epoch was used
exactly once, no sample is of another version than the one that was verified, every row of metrics is there once. The
plan `trainer` runs to a fixed step, and its samples and adapter are compared with those of two undisturbed runs of the
same seeds, `taught` (fine-tuning) with one. Writes chaos_matrix-cpu.json, in bench/results, after every event; a second
call does what is left. Prints a table. `fill` wants file systems that are its own; cut nodes: bench/nodes.py.
"""

import argparse
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from slipstream.orchestrator.files.row_files import read_rows  # noqa: E402
from slipstream.orchestrator.files.run_folder import saved_options  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "chaos_matrix-cpu.json"
MODULE = [sys.executable, "-m", "slipstream.orchestrator.cli.main"]
POLICY = [
    "experiment=quickstart", "run.eval_every_steps=0", "algorithm.groups_per_step=4", "algorithm.group_size=8",
    "reward.kind=tests.fakes.slow_reward:share_of_answer", "rollout.sampling.seed=1", "run.samples_per_step=4",
    "rollout.max_restarts=100",
]  # fmt: skip
TAUGHT = ["experiment=sft_quickstart"]
AGENTS = [
    "experiment=agent_game", "run.eval_every_steps=0", "algorithm.groups_per_step=4", "algorithm.group_size=8",
    "algorithm.max_staleness_steps=0", "run.samples_per_step=4", "run.loggers=[]", "rollout.max_restarts=100",
]  # fmt: skip
ALWAYS = [
    "run.checkpoint_every_steps=5", "cluster.dashboard=false", "trainer.max_restarts=100",
]  # fmt: skip
IN_A_STEP = ("sampling", "publish", "verify", "checkpoint", "recovery")
FIRST_STEP = 3
"""Events begin after it."""
FIRST_SAVED = 6
"""By then there is a checkpoint, which a run needs that is stopped or ended, and resumed."""
ENDS_A_RUN = ("raylet", "gcs", "node")
LIMIT_S = 900


@dataclass(frozen=True)
class Plan:
    """Events that share a run. Example: Plan([("engine", "kill", "publish")])."""

    events: Sequence[tuple[str, str, str]]
    words: Sequence[str] = tuple(POLICY)
    num_steps: int = 100_000
    """The run is stopped after the last event unless it ends by itself first."""
    twins: int = 0
    """Undisturbed runs that are made beside it, to compare with."""


def each(*victims: str, what: str = "kill", when: Sequence[str] = IN_A_STEP) -> list[tuple[str, str, str]]:
    """These victims at these moments."""
    return [(victim, what, moment) for victim in victims for moment in when]


PLANS = {
    "trainer": Plan(each("trainer", "controller", when=IN_A_STEP[:4]), num_steps=90, twins=2),
    "taught": Plan(each("trainer", "controller", when=("now", "checkpoint")), tuple(TAUGHT), num_steps=300, twins=1),
    "engine": Plan(each("engine")),
    "keeper": Plan([
        *each("keeper", when=("sampling",)), *each("trainer", when=("now",)), *each("controller", when=("recovery",)),
        *each("keeper", when=("publish", "checkpoint")), *each("trainer", "keeper", when=("recovery",)),
        *each("controller", what="stop", when=("sampling", "publish")),
        *each("raylet", "gcs", what="stop", when=("sampling",)), *each("worker"),
        *each("controller", what="term", when=("sampling", "publish", "checkpoint", "recovery")), *each("reward"),
    ]),
    "raylet": Plan([
        *each("raylet", "gcs", "node", when=("sampling",)),
        *each("raylet", "gcs", "node", when=IN_A_STEP[1:]),
    ]),
    "start": Plan(each("engine", "trainer", "controller", "worker", "raylet", "gcs", "reward", when=("start",))),
    "agent": Plan([*each("agent"), *each("agent", what="stop", when=("sampling",))], tuple(AGENTS)),
    "stop": Plan(each("engine", "worker", "trainer", "reward", what="stop")),
    "term": Plan(each("engine", "worker", "trainer", "reward", what="term")),
    "slow": Plan([
        *each("engine", "trainer", "worker", what="slow", when=("sampling", "publish")),
        *each("controller", "reward", what="slow", when=("sampling",)),
    ]),
    "fill": Plan([
        *each("shm", what="fill", when=("sampling", "publish")),
        *each("disk", what="fill", when=("sampling", "publish", "checkpoint")),
    ]),
}  # fmt: skip
"""What is most worth knowing comes first, for the day that is too short. `raylet` and what follows end a run, which is
resumed; `start` is a start of a resumed run.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", choices=[[], *PLANS])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/chaos_matrix"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = Results(arguments.out)
    for name in arguments.plans or (name for name in PLANS if name != "fill"):
        done = {tuple(row["cell"]) for row in results.read()["rows"] if row["plan"] == name}
        left = [cell for cell in PLANS[name].events if cell not in done]
        if left:
            carry_out(name, PLANS[name], left, arguments.folder / name, results)
    print_table(results.read()["rows"])


class Results:
    """The file of results. Several calls may write to it, plan by plan."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        if self._path.exists():
            return json.loads(self._path.read_text())
        return {"environment": environment(), "rows": [], "checks": {}}

    def row(self, row: dict[str, Any]) -> None:
        with self._changed() as results:
            results["rows"].append(row)

    def checks(self, plan: str, checks: dict[str, Any]) -> None:
        with self._changed() as results:
            results["checks"].setdefault(plan, []).append(checks)

    @contextmanager
    def _changed(self) -> Generator[dict[str, Any]]:
        lock = os.open(self._path.parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = self.read()
        yield results
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        partial.replace(self._path)
        os.close(lock)


def carry_out(name: str, plan: Plan, left: Sequence[tuple[str, str, str]], folder: Path, results: Results) -> None:
    """One run with these events, and its checks."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run, begun = folder / "run", [begin(plan, folder, "run")]
    for number, cell in enumerate(left):
        victim, what, moment = cell
        is_start = moment == "start"
        first = FIRST_SAVED if is_start or victim in ENDS_A_RUN else FIRST_STEP
        goes_on = has_made(run, first) and (not is_start or starts_again(run))
        if not goes_on:
            print(f"{name}: the run is over before {cell}", flush=True)
            break
        words = [str(run), victim, "--what", what, "--when", moment, "--seed", str(number), "--stop-s", "5", "--resume"]
        done = subprocess.run(
            [*MODULE, "chaos", *words, "--patience-s", "600", "--json"], capture_output=True, text=True, timeout=LIMIT_S
        )
        print(done.stderr, end="", flush=True)
        event = json.loads(done.stdout)["events"][0] if done.stdout else {"outcome": "error", "why": done.stderr[-300:]}
        results.row({"plan": name, "cell": cell, **event})
    if plan.num_steps > 10_000:
        subprocess.run([*MODULE, "stop", str(run)], capture_output=True, text=True, timeout=LIMIT_S)
    else:
        wait_for_end(run)
    begun[0].wait(LIMIT_S)
    checks: dict[str, Any] = checks_of(run, is_policy="sft" not in plan.words[0])
    twins = [folder / f"twin{number}" for number in range(plan.twins)]
    for twin in twins:
        begin(plan, folder, twin.name).wait(LIMIT_S)
    if twins:
        checks |= {"apart": [apart(run, twin) for twin in twins]}
        checks |= {"twins_apart": apart(*twins)} if len(twins) > 1 else {}
    print(f"{name}: {checks}", flush=True)
    results.checks(name, checks)


def begin(plan: Plan, folder: Path, name: str) -> subprocess.Popen[bytes]:
    words = [*plan.words, *ALWAYS, f"run.dir={folder}", f"run.name={name}", f"run.num_steps={plan.num_steps}"]
    with (folder / f"{name}.txt").open("w") as said:
        process = subprocess.Popen([*MODULE, "train", *words], stdout=said, stderr=said, start_new_session=True)
    while process.poll() is None and not (found := list(folder.glob(f"{name}-2*/control"))):
        time.sleep(0.05)
    (folder / name).symlink_to(found[0].parent.name)
    return process


def is_alive(run: Path) -> bool:
    said = subprocess.run([*MODULE, "status", str(run), "--json"], capture_output=True, text=True, timeout=120).stdout
    return bool(said) and json.loads(said)["state"] == "running"


def has_made(run: Path, num_steps: int) -> bool:
    """Wait until the run has made so many steps. Whether it goes on."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        rows = read_rows(run / "metrics.jsonl")
        if rows and rows[-1]["step"] >= num_steps:
            return is_alive(run)
        time.sleep(0.5)
    return False


def starts_again(run: Path) -> bool:
    """Stop the run, and resume it. Whether its start has begun."""
    subprocess.run([*MODULE, "stop", str(run)], capture_output=True, timeout=LIMIT_S)
    with (run / "resume.txt").open("a") as said:
        process = subprocess.Popen([*MODULE, "resume", str(run)], stdout=said, stderr=said, start_new_session=True)
    while process.poll() is None and not (run / "control" / "starting.json").exists():
        time.sleep(0.05)
    return process.poll() is None


def wait_for_end(run: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and is_alive(run):
        time.sleep(2)


def checks_of(run: Path, *, is_policy: bool) -> dict[str, Any]:
    """What a run's files say; whatever is not true is a fault."""
    rows = read_rows(run / "metrics.jsonl")
    found: dict[str, Any] = {"steps": rows[-1]["step"] if rows else None}
    found["every_row_once"] = [row["step"] for row in rows] == list(range(len(rows)))
    if not is_policy or len(rows) < 2:
        return found
    updates = accumulate(0 if row["optim/skipped"] else 1 for row in rows[1:])  # without a sample left there is none
    found["versions_as_updates"] = [row["policy_version"] for row in rows] == [0, *updates]
    found["steps_without_update"] = sum(row["optim/skipped"] or 0 for row in rows)
    # k3 of tokens of the version that is trained: where samples are always older, few steps have one.
    mismatches = [row["parity/k3"] for row in rows[1:] if not row["optim/skipped"] and row["parity/k3"] is not None]
    algorithm = saved_options(run)["algorithm"]
    # Engines on GPUs and bfloat16 have a mismatch of their own; a wrong version is far above it, and above 1e-3.
    bound = max(1e-3, 2 * statistics.median(mismatches or [0.0]))
    found["no_unverified_version"] = all(0 <= k3 < bound for k3 in mismatches)
    found["no_unverified_version"] &= all(row["staleness/max"] <= algorithm["max_staleness_steps"] for row in rows[1:])
    samples = [
        row
        for row in read_rows(run / "samples.jsonl")
        if 0 < row["step"] <= rows[-1]["step"] and row["kind"] == "training"
    ]
    prompts = {(sample["step"], sample["prompt_id"]) for sample in samples}
    found["every_step_has_its_groups"] = Counter(step for step, _ in prompts) == dict.fromkeys(
        range(1, len(rows)), algorithm["groups_per_step"]
    )
    counts = Counter(prompt for _, prompt in prompts)
    found["prompts"], found["epochs"] = len(prompts), rows[-1]["data/epoch"] + 1
    found["every_prompt_once_an_epoch"] = max(counts.values()) <= found["epochs"] and (
        found["epochs"] == 1 or min(counts.values()) >= found["epochs"] - 1
    )
    return found


def apart(run: Path, twin: Path) -> dict[str, Any]:
    """How far two runs of the same seeds are apart: the first step with another sample, and the adapters."""
    from safetensors.numpy import load_file

    sampled: list[dict[int, list[tuple[Any, ...]]]] = [{}, {}]
    for place, one in enumerate((run, twin)):
        for row in read_rows(one / "samples.jsonl"):
            fact = (row["prompt"], row["response"], row["reward"])
            sampled[place].setdefault(row["step"], []).append(fact)
    steps = sorted(sampled[0].keys() | sampled[1].keys())
    differs = [s for s in steps if sorted(sampled[0].get(s, [])) != sorted(sampled[1].get(s, []))]
    adapters = [load_file(one / "adapter" / "adapter_model.safetensors") for one in (run, twin)]
    largest = max(float(abs(values - adapters[1][name]).max()) for name, values in adapters[0].items())
    return {"first_other_sample_at_step": differs[0] if differs else None, "adapter": largest}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """As docs/chaos.md has it: in each cell the longest time without a step, and the time until all was as before."""
    moments = ("now", *IN_A_STEP, "start")
    print("| victim | " + " | ".join(moments) + " |\n" + "|---" * (len(moments) + 1) + "|")
    ordered = sorted(rows, key=lambda row: (row["cell"][1], row["plan"] == "taught"))
    for victim, what, is_taught in dict.fromkeys((*row["cell"][:2], row["plan"] == "taught") for row in ordered):
        mine = [row for row in rows if row["cell"][:2] == [victim, what] and (row["plan"] == "taught") is is_taught]
        of_cell = [[row for row in mine if row["cell"][2] == moment] for moment in moments]
        name = f"{victim}, {what}" + (", fine-tuning" if is_taught else "")
        print(f"| {name} | " + " | ".join(map(cell_text, of_cell)) + " |")


def cell_text(rows: Sequence[dict[str, Any]]) -> str:
    """Example: "10.4 / 13.4" of one event, "9.1-10.4 / 10.3-13.4 (3)" of three; what did not go on is named."""
    texts: list[str] = []
    good = [row for row in rows if row["outcome"] == "as before"]
    if good:
        spans = [sorted(row[name] or 0.0 for row in good) for name in ("longest_s", "all_after_s")]
        texts.append(" / ".join(f"{s[0]:.1f}" if len(s) == 1 else f"{s[0]:.1f}-{s[-1]:.1f}" for s in spans))
        texts += [f"({len(good)})"] if len(good) > 1 else []
        texts += ["resumed"] if any(row.get("resumed") for row in good) else []
        texts += [f"{again} made again"] if (again := max(row["steps_again"] for row in good)) else []
        texts += ["moment missed"] if not any(row["met"] for row in good) else []
    texts += [row["outcome"] for row in rows if row["outcome"] != "as before"]
    return ", ".join(texts).replace(", (", " (")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    main()
