"""A run that is harmed again and again: does it end, and what grows?

    python bench/soak.py --steps 1000 --every 60           the quick start's model, an event every minute
    python bench/soak.py --steps 5000 --every 0            the same without events
    python bench/soak.py --shape 30b --quiet 8 --for 540   two GPUs: all of Qwen3-30B-A3B, ended after nine minutes
    python bench/soak.py --shape 8b --quiet 12 --for 740   two GPUs: Qwen3-8B on one, three engines on the other
    python bench/soak.py --shape 8b-one-gpu --quiet 8 --for 640   the same, taking turns at one GPU

Every ten seconds it adds up, over all processes of the run, memory (each shared page counted once), descriptors,
threads and listening ports, and counts files in /dev/shm of this user. `by_process` has, for all processes of a name,
anonymous memory in MB and threads: pages of libraries, whose share falls and rises with other jobs' use, are not in it.
Writes bench/results/soak-NAME.json with samples, events and the checks of chaos_matrix.py, and draws soak-NAME.png
and soak-NAME-growth.png beside it. An event takes processes away for a while: it prints the medians of the first fifth
of the samples after the start, and of the last fifth.

`goodput` compares tokens trained a second, by the clock, from the last quiet step to the end with those of the quiet
steps (--quiet, the first two left out); its losses by cause are the run's own figures. `returned` has, for each event,
when steps were as quick as quiet ones, and when the fleet's former throughput was back (bench/recovery_phases.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench import recovery  # noqa: E402
from bench.chaos_matrix import ALWAYS, MODULE, POLICY, RESULTS, checks_of  # noqa: E402
from bench.environment import environment  # noqa: E402
from bench.parity_shapes import COMMON, QWEN3_8B  # noqa: E402
from bench.recovery_phases import SHARE, recovery_of  # noqa: E402
from slipstream.orchestrator.chaos.victims import Kind, victims_of  # noqa: E402
from slipstream.orchestrator.control.control_folder import how_it_ended, is_alive  # noqa: E402
from slipstream.orchestrator.files.row_files import last_rows, read_rows  # noqa: E402
from slipstream.orchestrator.files.run_folder import RunFolder  # noqa: E402
from slipstream.orchestrator.metrics.goodput import goodput_of  # noqa: E402

SAMPLE_EVERY_S = 10.0
WARM_UP_STEPS = 2
RECOVERY_S = 40.0
"""Before the end of --for the last event may begin."""
STOP_S = 10.0
SETTLED_STEP = 100
"""By then processes have what they need, and what is more is growth."""
STEADY_S, WINDOW_S = 20.0, 10.0
MOMENTS = ("sampling", "publish", "verify", "recovery")
FIGURES = ("memory_gb", "descriptors", "threads", "listening", "shm_files", "processes")
PROGRAM = r"\w+::\w+|\w+/\w+(?=\.py\b)|multiprocessing\.\w+|(?<=-m )\S+"
"""What tells processes of a command line apart: the name of an actor of Ray's, a file or a module."""
SHAPES = {
    "cpu": [*POLICY, *ALWAYS],
    "30b": [
        *recovery.SHAPES["30b"], *recovery.ENDLESS, *ALWAYS, "run.checkpoint_every_steps=0", "run.samples_per_step=16",
        "rollout.max_restarts=100", "rollout.num_workers=1", "reward.kind=bench.loops.reward:is_even",
    ],
    "8b": [
        "experiment=qwen3_moe_2gpu", "model=checkpoint", "model.init=random", "model.tokenizer=characters",
        "model.dtype=bfloat16", *recovery.ENDLESS, *ALWAYS, "run.checkpoint_every_steps=0", "run.samples_per_step=16",
        "rollout.max_restarts=100", "rollout.num_workers=3", "rollout.workers_per_gpu=3", "rollout.max_model_len=528",
        "rollout.sampling.max_tokens=512", "algorithm.groups_per_step=8", "algorithm.max_staleness_steps=3",
        "trainer.activations=keep", "trainer.max_microbatch_tokens=13568", "reward.kind=bench.loops.reward:is_even",
    ],
}  # fmt: skip
SHAPES["8b-one-gpu"] = [
    *(word for word in SHAPES["8b"] if not word.startswith(("rollout.workers_per_gpu", "trainer.activations"))),
    "cluster.share_gpu=true", "rollout.gpu_memory_utilization=0.2", "rollout.kv_cache_bytes=12000000000",
]  # fmt: skip
QWEN3_8B_MODEL = COMMON | QWEN3_8B | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36}
MODELS = {"8b": QWEN3_8B_MODEL, "8b-one-gpu": QWEN3_8B_MODEL}
"""config.json of the shapes whose options name no model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="cpu")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--for", dest="for_s", type=float, help="end the run so many seconds after its command")
    parser.add_argument("--quiet", type=int, default=1, help="steps before the first event")
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one event to the next; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/soak"))
    parser.add_argument("--victims", default="engine,worker,trainer,reward")
    parser.add_argument("--what", default="kill,stop,term")
    parser.add_argument("--when", help="default: sampling,publish,verify,recovery, and checkpoint if there are any")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("words", nargs="*", help="options of the run")
    arguments = parser.parse_args()
    arguments.when = arguments.when or ",".join(MOMENTS if arguments.shape != "cpu" else [*MOMENTS, "checkpoint"])
    run, folder, began = begin(arguments)
    harm: subprocess.Popen[bytes] | None = None
    ending: subprocess.Popen[bytes] | None = None
    samples: list[dict[str, Any]] = []
    while run.poll() is None or is_running(harm) or is_alive(folder.resolve()):
        time.sleep(SAMPLE_EVERY_S if arguments.for_s is None else 1.0)
        at = time.time() - began
        step = next((row["step"] for row in last_rows(folder / "metrics.jsonl", 1)), -1)
        if arguments.every and harm is None and step >= arguments.quiet:
            harm = begin_harm(arguments, folder, at)
        if harm is not None and harm.poll() and not (folder / "chaos.jsonl").exists():
            subprocess.run([*MODULE, "stop", str(folder)], check=False)
            sys.exit("nothing was harmed: see what slipstream chaos said above")
        if arguments.for_s is not None and ending is None and at >= arguments.for_s:
            if harm is not None and is_running(harm):  # it would resume what is stopped
                harm.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    harm.wait(STOP_S)
                harm.kill()
            write(arguments, folder, began, samples)  # its end may take longer than there is time
            ending = subprocess.Popen([*MODULE, "stop", str(folder)])
        if not samples or at - samples[-1]["at"] >= SAMPLE_EVERY_S - 1:
            samples.append({"at": at, "step": step, **sample(folder)})
    show(write(arguments, folder, began, samples), began)


def begin(arguments: argparse.Namespace) -> tuple[subprocess.Popen[bytes], Path, float]:
    """The run's command, its folder, and when it was called."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    own = [f"run.dir={arguments.folder}", f"run.num_steps={arguments.steps}", *arguments.words]
    if (model := MODELS.get(arguments.shape)) is not None:
        own.append(f"model.path={arguments.folder / 'model'}")
        (arguments.folder / "model").mkdir(exist_ok=True)
        (arguments.folder / "model" / "config.json").write_text(json.dumps(model))
    with (arguments.folder / "said.txt").open("w") as said:
        command = [*MODULE, "train", *SHAPES[arguments.shape], *own]
        run = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    return run, arguments.folder / "latest", time.time()


def is_running(process: subprocess.Popen[bytes] | None) -> bool:
    """Whether it has begun, and not ended."""
    return process is not None and process.poll() is None


def begin_harm(arguments: argparse.Namespace, folder: Path, at: float) -> subprocess.Popen[bytes]:
    """The command that harms the run, so many seconds after the run's own."""
    for_s = 1e9 if arguments.for_s is None else max(1.0, arguments.for_s - RECOVERY_S - at)
    series = ["--every", str(arguments.every), "--for", str(for_s), "--seed", str(arguments.seed)]
    ways = ["--what", arguments.what, "--when", arguments.when]
    resume = ["--resume"] if "controller" in arguments.victims else []
    return subprocess.Popen([*MODULE, "chaos", str(folder), arguments.victims, *series, *ways, *resume])


def write(arguments: argparse.Namespace, folder: Path, began: float, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is known, into the file of results."""
    events = read_rows(folder / "chaos.jsonl")
    result = {
        "environment": environment(arguments.commit), "arguments": {k: str(v) for k, v in vars(arguments).items()},
        "end": how_it_ended(folder.resolve()), "seconds": time.time() - began,
        "checks": checks_of(folder, is_policy=True), "goodput": goodput(folder, events),
        "returned": [
            returned(folder, event, then["time"], events[0]["step"])
            for event, then in zip(events, [*events[1:], {"time": math.inf}], strict=False)
        ],
        "starts": read_rows(folder / "startup.jsonl"), "events": events, "samples": samples,
    }  # fmt: skip
    file_of(arguments.name).write_text(json.dumps(result) + "\n")
    return result


def file_of(name: str) -> Path:
    """Where the results of this name are."""
    return RESULTS.with_name(f"soak-{name}.json")


def show(result: Mapping[str, Any], began: float) -> None:
    """Print what came of it, and draw the picture."""
    samples = result["samples"]
    for event, back in zip(result["events"], result["returned"], strict=True):
        print(event, back)
    print(json.dumps({name: result[name] for name in ("end", "seconds", "checks", "goodput")}, indent=1))
    print("figure: median of the first fifth of the samples after the start, of the last fifth")
    steady = [one for one in samples if one["step"] >= 1]
    fifth = max(1, len(steady) // 5)
    for name in FIGURES:
        early, late = (statistics.median(one[name] for one in part) for part in (steady[:fifth], steady[-fifth:]))
        print(f"{name}: {early:.4g}, {late:.4g}")
    for name in steady[0]["by_process"]:
        rows = [one["by_process"].get(name, [0.0, 0.0]) for one in steady]
        early, late = (map(statistics.median, zip(*part, strict=True)) for part in (rows[:fifth], rows[-fifth:]))
        print("{}: {:.1f} MB and {:.0f} threads, {:.1f} MB and {:.0f}".format(name, *early, *late))
    with suppress(ImportError):
        out = file_of(result["arguments"]["name"]).with_suffix(".png")
        draw(samples, [event["time"] - began for event in result["events"]], out)
        draw_growth(samples, out.with_stem(f"{out.stem}-growth"))


def goodput(folder: Path, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens trained a second, by the clock: of quiet steps, of those from the first event on, and their share. And
    what the run's own figures say.
    """
    tokens = {row["step"]: row["trainer/num_tokens"] or 0 for row in read_rows(folder / "metrics.jsonl")}
    ends = {row["step"]: row["to"] for row in read_rows(folder / "timeline.jsonl") if row["step"] in tokens}
    own = goodput_of(read_rows(folder / "metrics.jsonl"))
    found: dict[str, Any] = {"own": None if own is None else asdict(own)}
    if not events or events[0]["step"] <= WARM_UP_STEPS:
        return found
    borders = (WARM_UP_STEPS, events[0]["step"], max(ends))
    for name, first, last in zip(("quiet", "harmed"), borders, borders[1:], strict=False):
        trained = sum(tokens[step] for step in range(first + 1, last + 1))
        found |= {f"{name}_steps": last - first, f"{name}_tokens_per_s": trained / (ends[last] - ends[first])}
    return found | {"beside_quiet": found["harmed_tokens_per_s"] / found["quiet_tokens_per_s"]}


def returned(folder: Path, event: Mapping[str, Any], until: float, num_quiet: int) -> dict[str, Any]:
    """Before the next event, seconds from the blow to the first step that takes no longer than quiet ones; and, of an
    engine or worker that it ended, to the fleet's former throughput, by phases.
    """
    steps = read_rows(folder / "timeline.jsonl")
    quiet_s = [row["to"] - row["from"] for row in steps if WARM_UP_STEPS < row["step"] <= num_quiet]
    most_s = statistics.median(quiet_s or [0.0]) / SHARE
    later = (row["from"] - event["time"] for row in steps if row["to"] - row["from"] <= most_s)
    quick = {"quick_step_s": next((at for at in later if at > 0), None)}
    kind, _, number = event["victim"].partition("-")
    if kind not in ("engine", "worker") or event["what"] == "stop" or not event["pids"]:
        return quick
    rows = [row for row in read_rows(folder / "fleet.jsonl") if row["time"] < until]
    found = recovery_of(rows, int(number), event["time"], steady_s=STEADY_S, window_s=WINDOW_S)
    names = ("phases", "returned_s", "first_token_s", "former_tokens_per_s", "former_windows_tokens_per_s")
    return quick | {name: found.get(name) for name in names}


def sample(folder: Path) -> dict[str, Any]:
    """All processes of the run together, and by name."""
    found: dict[str, float] = dict.fromkeys(FIGURES, 0.0)
    by_process: dict[str, list[float]] = {}
    for process, name in processes_of(folder).items():
        with suppress(psutil.Error, OSError):
            threads, rows = process.num_threads(), Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            kb = {row.split()[0]: float(row.split()[1]) for row in rows[1:]}
            found["memory_gb"] += kb["Pss:"] * 1024 / 1e9
            found["descriptors"] += process.num_fds()
            found["threads"] += threads
            found["listening"] += sum(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
            found["processes"] += 1
            anonymous, others = by_process.get(name, [0.0, 0.0])
            by_process[name] = [round(anonymous + kb["Pss_Anon:"] * 1024 / 1e6, 1), others + threads]
    with suppress(OSError):
        found["shm_files"] = sum(one.stat().st_uid == os.geteuid() for one in Path("/dev/shm").iterdir())
    return {**found, "by_process": by_process}


def processes_of(folder: Path) -> dict[psutil.Process, str]:
    """Those of the run, and their names. Also of a run whose command was killed: what holds a file of it open, and what
    descends from that.
    """
    found: dict[psutil.Process, str] = {}
    for victim in victims_of(RunFolder(folder)):
        for process in victim.processes:
            with suppress(psutil.Error):
                for one in (process, *process.children(recursive=True)):
                    program = re.search(PROGRAM, " ".join(one.cmdline()))
                    found.setdefault(one, program[0] if program else one.name())
                if victim.kind is not Kind.node:
                    found[process] = victim.kind
    return found


def draw(samples: list[dict[str, Any]], events: list[float], path: Path) -> None:
    """One curve per figure, events as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(FIGURES), 1, figsize=(9, 12), sharex=True)
    minutes = [one["at"] / 60 for one in samples]
    for panel, name in zip(panels, FIGURES, strict=True):
        panel.plot(minutes, [one[name] for one in samples], linewidth=1)
        panel.set_ylabel(name)
        panel.set_ylim(0, 1.1 * max(one[name] for one in samples) or 1)
        for at in events:
            panel.axvline(at / 60, color="tab:red", alpha=0.25, linewidth=0.8)
    panels[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def draw_growth(samples: list[dict[str, Any]], path: Path) -> None:
    """Anonymous memory of all processes of a name, beside what they had once they had warmed up."""
    from matplotlib import pyplot

    later = [one for one in samples if one["step"] >= SETTLED_STEP and one["processes"]]
    figure, panel = pyplot.subplots(figsize=(9, 3.5))
    for name, (settled_mb, _) in later[0]["by_process"].items() if later else ():
        more = [one["by_process"].get(name, [math.nan])[0] - settled_mb for one in later]
        label = name if max(map(abs, more)) >= 1 else None
        panel.plot([one["step"] for one in later], more, linewidth=1, label=label)
    panel.set(xlabel="step", ylabel=f"MB more than at step {SETTLED_STEP}")
    panel.set_ylim(-10, max(40, panel.get_ylim()[1]))  # so that small ones look small
    panel.legend(fontsize=6, ncols=4, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    main()
