"""A run that is harmed again and again: does it end, and what grows?

    python bench/soak.py --steps 1000 --every 60           the quick start's model, an event every minute
    python bench/soak.py --steps 5000 --every 0            the same without events

Every ten seconds it adds up, over all processes of the run, memory (each shared page counted once), descriptors,
threads and listening ports, and counts files in /dev/shm of this user. Writes bench/results/soak-NAME.json with
samples, events and the checks of chaos_matrix.py, and draws soak-NAME.png beside it. An event takes processes away for
a while: it prints the medians of the first fifth of the samples after the start, and of the last fifth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.chaos_matrix import ALWAYS, MODULE, POLICY, RESULTS, checks_of  # noqa: E402
from bench.environment import environment  # noqa: E402
from slipstream.orchestrator.files.row_files import last_rows, read_rows  # noqa: E402

SAMPLE_EVERY_S = 10.0
FIGURES = ("memory_gb", "descriptors", "threads", "listening", "shm_files", "processes")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one event to the next; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/soak"))
    parser.add_argument("--victims", default="engine,worker,trainer,reward")
    parser.add_argument("words", nargs="*", help="options of the run")
    arguments = parser.parse_args()
    words = [*POLICY, *ALWAYS, f"run.dir={arguments.folder}", f"run.num_steps={arguments.steps}", *arguments.words]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (arguments.folder / "said.txt").open("w") as said:
        began = time.time()
        run = subprocess.Popen([*MODULE, "train", *words], stdout=said, stderr=said, start_new_session=True)
    folder, harm = arguments.folder / "latest", None
    samples: list[dict[str, float]] = []
    while run.poll() is None:
        time.sleep(SAMPLE_EVERY_S)
        step = next((row["step"] for row in last_rows(folder / "metrics.jsonl", 1)), -1)
        if arguments.every and harm is None and step >= 1:
            series = ["--every", str(arguments.every), "--for", "1e9", "--seed", str(arguments.seed)]
            ways = ["--what", "kill,stop,term", "--when", "sampling,publish,verify,checkpoint,recovery"]
            harm = subprocess.Popen([*MODULE, "chaos", str(folder), arguments.victims, *series, *ways])
        with suppress(psutil.Error):
            samples.append({"at": time.time() - began, "step": step, **sample(psutil.Process(run.pid))})
    if harm is not None:
        harm.wait(600)
    events = read_rows(folder / "chaos.jsonl")
    result = {
        "environment": environment(), "arguments": {k: str(v) for k, v in vars(arguments).items()},
        "exit_code": run.wait(), "seconds": time.time() - began, "checks": checks_of(folder, is_policy=True),
        "events": events, "samples": samples,
    }  # fmt: skip
    out = RESULTS.with_name(f"soak-{arguments.name}.json")
    out.write_text(json.dumps(result) + "\n")
    draw(samples, [event["time"] - began for event in events], out.with_suffix(".png"))
    print(json.dumps({name: result[name] for name in ("exit_code", "seconds", "checks")}, indent=1))
    print("figure: median of the first fifth of the samples after the start, of the last fifth")
    steady = [one for one in samples if one["step"] >= 1]
    fifth = max(1, len(steady) // 5)
    for name in FIGURES:
        early, late = (statistics.median(one[name] for one in part) for part in (steady[:fifth], steady[-fifth:]))
        print(f"{name}: {early:.4g}, {late:.4g}")


def sample(command: psutil.Process) -> dict[str, float]:
    """All processes of the run together."""
    found: dict[str, float] = dict.fromkeys(FIGURES, 0.0)
    for process in [command, *command.children(recursive=True)]:
        with suppress(psutil.Error):
            found["memory_gb"] += process.memory_full_info().pss / 1e9
            found["descriptors"] += process.num_fds()
            found["threads"] += process.num_threads()
            found["listening"] += sum(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
            found["processes"] += 1
    with suppress(OSError):
        found["shm_files"] = sum(one.stat().st_uid == os.geteuid() for one in Path("/dev/shm").iterdir())
    return found


def draw(samples: list[dict[str, float]], events: list[float], path: Path) -> None:
    """One curve per figure, events as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(FIGURES), 1, figsize=(9, 12), sharex=True)
    minutes = [one["at"] / 60 for one in samples]
    for panel, name in zip(panels, FIGURES, strict=True):
        panel.plot(minutes, [one[name] for one in samples], linewidth=1)
        panel.set_ylabel(name)
        panel.set_ylim(bottom=0)
        for at in events:
            panel.axvline(at / 60, color="tab:red", alpha=0.25, linewidth=0.8)
    panels[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    main()
