"""A rollout worker of a running job is killed under load: how long until all is as before, and where the time goes.

    python bench/recovery.py                            a CPU: the quick start's model, two engines, 5 to 6 minutes
    python bench/recovery.py --shape 30b --workers 1    two GPUs: all of Qwen3-30B-A3B; the trainer sends weights
    python bench/recovery.py --shape 30b --workers 2    three GPUs: weights come from the other engine's memory

The job is `slipstream train`. Once it has sampled for --steady-s, the process of a worker gets SIGKILL; phases and
tokens come from the run's fleet.jsonl (docs/metrics.md), and bench/recovery_phases.py says how they are computed. The
next kill follows when the former throughput is back; victims take turns. Beside it, a plain restart: a fresh engine of
the same options that loads as many weights from a folder on local disk, with the page cache dropped before, from the
start of its process to its first token. It has no failure to notice and no former throughput. It runs under the load
that recoveries have: beside the job, which goes on with one engine less (the last kill finds no restart left), and on
that engine's GPU. With one engine it runs alone, after the job.

Prints its environment, every repeat, and medians; writes bench/results/recovery-<device>.json and a picture beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from bench.plain_restart import cpu_seconds  # noqa: E402
from bench.push import drop_cache, write_checkpoint  # noqa: E402
from bench.recovery_phases import MARKS, SHARE, median_phases, phases_of, recovery_of  # noqa: E402
from slipstream.orchestrator.files.row_files import read_rows  # noqa: E402

ENDLESS = [
    "run.num_steps=1000000", "run.eval_every_steps=0", "run.checkpoint_every_steps=0", "data.eval_path=null",
    "cluster.dashboard=false", "run.name=recovery", "rollout.sampling.stop_at_eos=false", "trainer.num_ranks=1",
    "trainer.ep_size=1",
]  # fmt: skip
SHAPES = {
    "cpu": [
        "experiment=quickstart", "rollout.sampling.max_tokens=48", "algorithm.max_staleness_steps=2",
        "algorithm.group_size=8",
    ],
    "30b": [
        "experiment=qwen3_moe_2gpu", "model.hf_config.num_hidden_layers=48", "rollout.max_model_len=1024",
        "rollout.sampling.max_tokens=512", "algorithm.max_staleness_steps=1",
    ],
}  # fmt: skip
"""Options of the job, over those of ENDLESS. 30b: 256 responses of 512 tokens a step."""
POLL_S = 0.25
PATIENCE = 2
"""Windows in which the killed worker's own throughput may come back, from the fleet's return on."""
END_TIMEOUT_S = 120.0
COLORS = ("#999999", "#56B4E9", "#0072B2", "#CC79A7", "#009E73", "#F0E442", "#D55E00", "#E69F00", "#000000", "#BBBBBB")


class Job:
    """A run under way, in a process group of its own. Use as a context manager, which ends it."""

    def __init__(self, words: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder / "latest"
        self._said = folder / "said.txt"
        command = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "train", f"run.dir={folder}", *words]
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(END_TIMEOUT_S)

    def wait(self, limit_s: float) -> None:
        """Wait for its end. Raises SystemExit, with what it said last, unless that is a success within the limit."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the run took more than {limit_s:g} s:\n{self.last_words}") from None
        if code:
            raise SystemExit(f"the run ended with exit code {code}:\n{self.last_words}")

    @property
    def last_words(self) -> str:
        """What the command said last."""
        return self._said.read_text()[-3000:]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """fleet.jsonl."""
        return read_rows(self.folder / "fleet.jsonl")

    @property
    def num_steps(self) -> int:
        """Optimizer steps done."""
        return max((row["step"] for row in read_rows(self.folder / "metrics.jsonl")), default=0)

    def wait_until(self, is_so: Callable[[list[dict[str, Any]]], bool], limit_s: float) -> bool:
        """Look at the rows until they are enough. False: not within the limit.

        Raises:
            SystemExit: The run ended by itself.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"the run ended by itself:\n{self.last_words}")
            if is_so(self.rows):
                return True
            time.sleep(POLL_S)
        return False


def kill_one(job: Job, worker: int, args: argparse.Namespace) -> dict[str, Any]:
    """Wait for a steady state, kill a worker, and wait until the fleet samples as before."""
    since = max((row["time"] for row in job.rows if row["event"] == "first_token"), default=time.time())

    def is_steady(rows: list[dict[str, Any]]) -> bool:
        newest = {row["name"]: row["time"] for row in rows if row["event"] == "tokens"}
        return sum(at >= since + args.settle_s + args.steady_s for at in newest.values()) >= args.workers

    if not job.wait_until(is_steady, args.limit_s):
        raise SystemExit(f"no steady state within {args.limit_s} s")
    pid, before, killed_at = pid_of(job, worker), job.num_steps, time.time()
    os.kill(pid, signal.SIGKILL)
    cpu_s: list[float] = []

    def found(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(recovery_of(rows, worker, killed_at, steady_s=args.steady_s, window_s=args.window_s))

    def is_back(rows: list[dict[str, Any]]) -> bool:
        recovery = found(rows)
        if "weights" in recovery["phases"] and not cpu_s:  # at most POLL_S after it serves
            cpu_s.append(sum(map(cpu_seconds, processes_of(job, worker))))
        if recovery["returned_s"] is None or recovery["worker_returned_s"] is not None:
            return recovery["returned_s"] is not None
        # The fleet is back with another share of the load on each worker; this one's may never be what it was.
        return max(row["time"] for row in rows) > killed_at + recovery["returned_s"] + PATIENCE * args.window_s

    job.wait_until(is_back, args.limit_s)  # what is not reached by then is missing from the figures
    return found(job.rows) | {
        "steps_meanwhile": job.num_steps - before, "load_average": os.getloadavg()[0],
        "cpu_s": cpu_s[0] if cpu_s else None,
    }  # fmt: skip


def put_out(job: Job, worker: int, args: argparse.Namespace) -> None:
    """Kill a worker whose restarts are used up."""
    os.kill(pid_of(job, worker), signal.SIGKILL)
    if not job.wait_until(lambda rows: any(row["event"] == "out" for row in rows), args.limit_s):
        raise SystemExit("a worker without a restart left is still in service")


def pid_of(job: Job, worker: int) -> int:
    """Its newest process."""
    starts = [row for row in job.rows if row["event"] == "process_up" and row["worker"] == worker]
    return max(starts, key=lambda row: row["time"])["pid"]


def processes_of(job: Job, worker: int) -> list[int]:
    """The same, and its engine's, which no process of the worker is the parent of."""
    log = (job.folder / "run.log").read_text()
    pid = pid_of(job, worker)
    return [pid, *map(int, re.findall(rf" is process {pid} at .*; its engine is process (\d+)", log))]


def emptiest_gpu() -> dict[str, str]:
    """The variable that shows a process only the GPU with the least memory in use, of those that this process may
    use; nothing without GPUs.
    """
    if not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", "--query-gpu=memory.used,index", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query.append(f"--id={visible}")
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    _, index = min(tuple(map(int, line.split(","))) for line in said.splitlines())
    return {"CUDA_VISIBLE_DEVICES": str(index)}


def restart_plainly(run: Path, checkpoint: Path, limit_s: float) -> dict[str, Any]:
    """One plain restart, from the start of its process."""
    resident, began_at = drop_cache(checkpoint), time.time()
    command = [sys.executable, str(ROOT / "bench" / "plain_restart.py"), str(run), str(checkpoint)]
    variables = {**os.environ, **emptiest_gpu()}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the plain restart took more than {limit_s} s") from None
    if done.returncode:
        raise SystemExit(f"the plain restart failed:\n{done.stderr[-3000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    marks = said["marks"]
    phases = phases_of(began_at, marks)
    return {
        "first_token_s": marks["first_token"] - began_at,
        "phases": {("engine up, weights" if name == "engine up" else name): s for name, s in phases.items()},
        "resident_before": resident,
        "cpu_s": said["cpu_s"],
        "load_average": os.getloadavg()[0],
    }


def measure(
    args: argparse.Namespace, words: list[str], folder: Path, report: dict[str, Any], keep: Callable[[], None]
) -> None:
    """The job with its kills, and the plain restarts. `keep` is called whenever there is more in the report."""
    checkpoint = (args.folder or folder) / "checkpoint"

    def plain(run: Path) -> None:
        shutil.copytree(run / "model", checkpoint, dirs_exist_ok=True)
        write_checkpoint(checkpoint, json.loads((checkpoint / "config.json").read_text()))
        report["checkpoint_bytes"] = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        for _ in range(args.plain_repeats):
            report["plain"].append(restart_plainly(run, checkpoint, args.limit_s))
            say("plain restart", report["plain"][-1])
            keep()

    with Job(words, folder) as job:
        if not job.wait_until(lambda rows: any(row["event"] == "first_token" for row in rows), args.start_limit_s):
            raise SystemExit(f"no token within {args.start_limit_s} s")
        for repeat in range(args.repeats):
            report["recoveries"].append(kill_one(job, repeat % args.workers, args))
            say(f"worker {repeat % args.workers} killed", report["recoveries"][-1])
            report["fleet"] = [row for row in job.rows if row["event"] != "tokens"]
            report["startup"] = read_rows(job.folder / "startup.jsonl")
            keep()
        if args.workers > 1 and args.plain_repeats:
            put_out(job, 0, args)
            plain(job.folder)
    if args.workers == 1 and args.plain_repeats:
        plain(job.folder)


def say(title: str, way: dict[str, Any]) -> None:
    """One repeat, as soon as it is known."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in way["phases"].items())
    print(f"{title}: {phases} s", flush=True)


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Medians of both ways."""
    medians: dict[str, Any] = {}
    for name in ("recoveries", "plain"):
        ways = report[name]
        # The plain restart's engine start contains its weights; it is counted under that name.
        renamed = [{phase.removesuffix(", weights"): s for phase, s in way["phases"].items()} for way in ways]
        medians[name] = {
            "phases": median_phases(renamed),
            **{
                key: statistics.median(values)
                for key in ("first_token_s", "cpu_s", "returned_s", "worker_returned_s", "former_tokens_per_s",
                            "worker_former_tokens_per_s", "away_tokens_per_s", "read_bytes", "read_s", "read_gb_per_s")
                if (values := [way[key] for way in ways if way.get(key) is not None])
            },
        }  # fmt: skip
    return medians


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    ways = report["medians"]
    print(f"\n{'median seconds':28}{'recovery':>12}{'plain restart':>16}")
    for phase in MARKS.values():
        cells = [ways[name]["phases"].get(phase) for name in ("recoveries", "plain")]
        if any(cell is not None for cell in cells):
            left, right = ("-" if cell is None else f"{cell:.2f}" for cell in cells)
            print(f"{phase:28}{left:>12}{right:>16}")
    for key in ("first_token_s", "cpu_s", "returned_s", "worker_returned_s", "former_tokens_per_s", "away_tokens_per_s",
                "worker_former_tokens_per_s", "read_s", "read_gb_per_s"):  # fmt: skip
        cells = [ways[name].get(key) for name in ("recoveries", "plain")]
        left, right = ("-" if cell is None else f"{cell:.4g}" for cell in cells)
        print(f"{key:28}{left:>12}{right:>16}")
    num_back = sum(way["returned_s"] is not None for way in report["recoveries"])
    print(f"{num_back} of {len(report['recoveries'])} kills: {SHARE:.0%} of the former tokens/s within the limit")
    print("cpu_s: user and system of the new process and its engine's, until it serves")
    if report["plain"]:
        print(f"the plain restart's engine start contains the reading of {report['checkpoint_bytes'] / 1e9:.3f} GB")


def plot(report: dict[str, Any], file: Path) -> None:
    """A bar of phases for each way, and the fleet's tokens per second around every kill."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print(f"no matplotlib here; elsewhere: python bench/recovery.py --draw {file.with_suffix('.json')}")
        return
    figure, (bars, lines) = pyplot.subplots(2, 1, figsize=(9, 5.2), height_ratios=(1, 1.4))
    colors = dict(zip(MARKS.values(), COLORS, strict=True))
    labels = {"recoveries": "recovery", "plain": "plain restart\n(weights from disk)"}
    labels = {name: label for name, label in labels.items() if report[name]}
    for index, name in enumerate(labels):
        left = 0.0
        for phase, seconds in report["medians"][name]["phases"].items():
            bars.barh(index, seconds, left=left, color=colors[phase])
            left += seconds
        bars.text(left, index, f" {left:.1f} s", va="center", fontsize=8)
    bars.set_yticks(range(len(labels)), list(labels.values()), fontsize=8)
    bars.invert_yaxis()
    bars.margins(x=0.1)
    bars.set_xlabel("seconds from the kill; from the start of the process (plain)", fontsize=8)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    bars.legend(handles, list(colors), fontsize=6, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for number, way in enumerate(report["recoveries"]):
        seconds, rates = zip(*way["tokens_per_s_by_second"], strict=True)
        lines.plot(seconds, rates, linewidth=1, label=f"kill {number + 1}, worker {way['worker']}")
        lines.axhline(way["former_tokens_per_s"], color="#CCCCCC", linewidth=0.6)
    lines.axvline(0, color="black", linewidth=0.6)
    lines.set_xlabel("seconds from the kill", fontsize=8)
    lines.set_ylabel("fleet, response tokens/s", fontsize=8)
    lines.set_ylim(bottom=0)
    lines.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    print(f"written: {file}")


def main() -> None:
    """Measure, or draw a file again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--workers", type=int, default=2, help="engines; 1: the trainer sends the weights")
    parser.add_argument("--repeats", type=int, default=3, help="kills")
    parser.add_argument("--plain-repeats", type=int, default=3, help="plain restarts; 0: none")
    parser.add_argument("--settle-s", type=float, default=4.0, help="after a first token, before the steady state")
    parser.add_argument(
        "--steady-s", type=float, help="before a kill: the former throughput; default: 16, and 60 for 30b, whose first "
        "step is trained half a minute after the first token"
    )  # fmt: skip
    parser.add_argument("--window-s", type=float, default=8.0, help=f"in which {SHARE:.0%}% of it must be reached")
    parser.add_argument("--limit-s", type=float, default=120.0, help="for one recovery, or one plain restart")
    parser.add_argument("--start-limit-s", type=float, default=600.0, help="for the job's first token")
    parser.add_argument("--set", nargs="*", default=[], help="further options of the job")
    parser.add_argument("--folder", type=Path, help="local disk for the checkpoint; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="default: bench/results/recovery-<device>.json")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--draw", type=Path, help="only show this file again")
    args = parser.parse_args()
    if args.steady_s is None:
        args.steady_s = 16.0 if args.shape == "cpu" else 60.0
    if args.draw:
        report = json.loads(args.draw.read_text())
        show(report)
        plot(report, args.draw.with_suffix(".png"))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the job ends with this process
    words = [*SHAPES[args.shape], *ENDLESS, f"rollout.num_workers={args.workers}",
             f"rollout.max_restarts={-(-args.repeats // args.workers)}", *args.set]  # fmt: skip
    report = {"environment": environment(args.commit), "words": words, "recoveries": [], "plain": []}
    report |= {name: getattr(args, name) for name in ("workers", "settle_s", "steady_s", "window_s")}
    print(json.dumps(report["environment"], indent=2))
    out: Path = (
        args.out or ROOT / "bench/results" / f"recovery-{'gpu' if report['environment']['gpus'] else 'cpu'}.json"
    )

    def keep() -> None:
        report["medians"] = summary(report)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="slipstream-bench-", ignore_cleanup_errors=True) as folder:
        measure(args, words, Path(folder), report, keep)
    show(report)
    print(f"written: {out}")
    plot(report, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
