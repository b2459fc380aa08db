"""A rollout worker of a running job is killed under load: how long until all is as before, and where the time goes.

    python bench/recovery.py                            a CPU: the quick start's model, two engines, 5 to 6 minutes
    python bench/recovery.py --shape 30b --workers 1    two GPUs: all of Qwen3-30B-A3B; the trainer sends weights
    python bench/recovery.py --shape 30b --workers 2    three GPUs: weights come from the other engine's memory

The job is `slipstream train`. Once it has sampled for --steady-s, the process of a worker gets SIGKILL; phases and
tokens come from the run's fleet.jsonl (docs/metrics.md), and bench/recovery_phases.py says how they are computed. The
next kill follows when the former throughput is back; victims take turns.

Prints its environment, every repeat, and medians; writes bench/results/recovery-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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

import psutil  # noqa: E402

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.recovery_phases import MARKS, SHARE, median_phases, recovery_of  # noqa: E402
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


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all below it, user and system."""
    top = psutil.Process(pid)
    times = [process.cpu_times() for process in [top, *top.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


def pid_of(job: Job, worker: int) -> int:
    """Its newest process."""
    starts = [row for row in job.rows if row["event"] == "process_up" and row["worker"] == worker]
    return max(starts, key=lambda row: row["time"])["pid"]


def processes_of(job: Job, worker: int) -> list[int]:
    """The same, and its engine's, which no process of the worker is the parent of."""
    log = (job.folder / "run.log").read_text()
    pid = pid_of(job, worker)
    return [pid, *map(int, re.findall(rf" is process {pid} at .*; its engine is process (\d+)", log))]


def measure(
    args: argparse.Namespace, words: list[str], folder: Path, report: dict[str, Any], keep: Callable[[], None]
) -> None:
    """The job with its kills. `keep` is called whenever there is more in the report."""
    with Job(words, folder) as job:
        if not job.wait_until(lambda rows: any(row["event"] == "first_token" for row in rows), args.start_limit_s):
            raise SystemExit(f"no token within {args.start_limit_s} s")
        for repeat in range(args.repeats):
            report["recoveries"].append(kill_one(job, repeat % args.workers, args))
            say(f"worker {repeat % args.workers} killed", report["recoveries"][-1])
            report["fleet"] = [row for row in job.rows if row["event"] != "tokens"]
            report["startup"] = read_rows(job.folder / "startup.jsonl")
            keep()


def say(title: str, way: dict[str, Any]) -> None:
    """One repeat, as soon as it is known."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in way["phases"].items())
    print(f"{title}: {phases} s", flush=True)


FIGURES = (
    "first_token_s", "cpu_s", "returned_s", "worker_returned_s", "former_tokens_per_s", "away_tokens_per_s",
    "worker_former_tokens_per_s", "read_bytes", "read_s", "read_gb_per_s",
)  # fmt: skip


def summary(recoveries: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the kills."""
    known = {key: [way[key] for way in recoveries if way.get(key) is not None] for key in FIGURES}
    medians = {key: statistics.median(values) for key, values in known.items() if values}
    return {"phases": median_phases([way["phases"] for way in recoveries]), **medians}


def show(report: dict[str, Any]) -> None:
    medians = report["medians"]
    for phase in MARKS.values():
        if phase in medians["phases"]:
            print(f"{phase:28}{medians['phases'][phase]:>12.2f} s")
    for key in FIGURES:
        print(f"{key:28}{medians[key]:>12.4g}" if key in medians else f"{key:28}{'-':>12}")
    num_back = sum(way["returned_s"] is not None for way in report["recoveries"])
    print(f"{num_back} of {len(report['recoveries'])} kills: {SHARE:.0%} of the former tokens/s within the limit")
    print("cpu_s: user and system of the new process and its engine's, until it serves")


def main() -> None:
    """Measure."""
    parser = command_line(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--workers", type=int, default=2, help="engines; 1: the trainer sends the weights")
    parser.add_argument("--repeats", type=int, default=3, help="kills")
    parser.add_argument("--settle-s", type=float, default=4.0, help="after a first token, before the steady state")
    parser.add_argument(
        "--steady-s", type=float, help="before a kill: the former throughput; default: 16, and 60 for 30b, whose first "
        "step is trained half a minute after the first token"
    )  # fmt: skip
    parser.add_argument("--window-s", type=float, default=8.0, help=f"in which {SHARE:.0%}% of it must be reached")
    parser.add_argument("--limit-s", type=float, default=120.0, help="for one recovery")
    parser.add_argument("--start-limit-s", type=float, default=600.0, help="for the job's first token")
    parser.add_argument("--set", nargs="*", default=[], help="further options of the job")
    args = parser.parse_args()
    if args.steady_s is None:
        args.steady_s = 16.0 if args.shape == "cpu" else 60.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the job ends with this process
    words = [*SHAPES[args.shape], *ENDLESS, f"rollout.num_workers={args.workers}",
             f"rollout.max_restarts={-(-args.repeats // args.workers)}", *args.set]  # fmt: skip
    report = {"environment": environment(args.commit), "words": words, "recoveries": []}
    report |= {name: getattr(args, name) for name in ("workers", "settle_s", "steady_s", "window_s")}
    print(json.dumps(report["environment"], indent=2))
    out: Path = args.out or RESULTS / f"recovery-{'gpu' if report['environment']['gpus'] else 'cpu'}.json"

    def keep() -> None:
        report["medians"] = summary(report["recoveries"])
        write_report(out, report)

    with tempfile.TemporaryDirectory(prefix="slipstream-bench-", ignore_cleanup_errors=True) as folder:
        measure(args, words, Path(folder), report, keep)
    show(report)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
