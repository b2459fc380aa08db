"""A model so small that an engine waits for its own Python: one engine on a GPU, and several side by side.

    python bench/small_model.py engines --model FOLDER                 tokens/s of 512 requests, engines alone
    python bench/small_model.py job --model FOLDER --workers 1 3       a whole job, one engine and three on a GPU

engines: `bare` is vLLM's LLM.generate without and with log-probabilities, `ours` a rollout worker's engine. The same
number of requests is split over 1, 2, ... of the latter on one GPU; each figure is the median of --repeats waves.
--variants are bare engines that differ in one thing from what a run's engine gets. With --pyspy FILE both processes of
a single engine are sampled meanwhile: which functions they are in.
job: GRPO with a LoRA on sums, all responses of --length tokens, the trainer on one GPU and --workers engines on
another, or with --one-gpu all on one. Figures are medians over the steps after the first --warm-up.

Prints a table; writes bench/results/small_model-<mode>-<device>.json after every figure.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import psutil  # noqa: E402

from bench import runs  # noqa: E402
from bench.arithmetic import num_responses  # noqa: E402
from bench.environment import environment  # noqa: E402
from bench.loops.row_process import RESULT, python_path, sampled_gpus  # noqa: E402
from bench.loops.small_engine import GROUP  # noqa: E402

WAYS = {"bare": [False, True], "ours": [True]}
"""Whether each is measured with log-probabilities."""
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "sync": ({"async_scheduling": False}, {}),
    "runner-v1": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "no-prefix-cache": ({"enable_prefix_caching": False}, {}),
}
"""Arguments and environment variables of vLLM."""
PROFILE_S = 4
PROFILE_RATE = 200
NUM_PROMPTS = 4000
NUM_FUNCTIONS = 60
SAMPLED_S = 20
"""An engine's load is measured over so many seconds at the end of its run."""


class Child:
    """An engine in a process of its own."""

    def __init__(self, way: str, number: int, args: argparse.Namespace, log: Path) -> None:
        self._name = f"{way} {number}"
        arguments, variables = VARIANTS.get(way, ({}, {}))
        job = {
            "way": "ours" if way == "ours" else "bare",
            "arguments": arguments,
            "model": str(args.model),
            "most": args.requests,
            "length": args.length,
            "device": args.device,
            "kv_cache_bytes": args.kv_mib << 20,
        }
        self._log = (log / f"{way}-{number}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.loops.small_engine", json.dumps(job)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": python_path()} | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def order(self, **asked: Any) -> None:
        """Ask for something; `answer` has it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError: the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
            self._log.write(line)
        raise RuntimeError(f"{self._name} ended with code {self._process.wait()}; see {self._log.name}")

    def end(self) -> None:
        """Take no more orders."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def measure_engines(args: argparse.Namespace, report: dict[str, Any], logs: Path) -> None:
    """All cells, while all engines are up: those that are not asked do nothing."""
    ways = [*args.ways, *args.variants]
    sizes = {way: max(args.engines) if way == "ours" else 1 for way in ways}
    children: dict[str, list[Child]] = {}
    try:
        for way, num in sizes.items():
            children[way] = [Child(way, number, args, logs) for number in range(num)]
        up = {way: [child.answer() for child in group] for way, group in children.items()}
        report["up_s"] = {way: [one["up_s"] for one in answers] for way, answers in up.items()}
        print(f"engines are up: {json.dumps(report['up_s'])}", flush=True)
        for num in args.engines:
            for way in (way for way in ways if num <= sizes[way]):
                for logprobs in WAYS.get(way, WAYS["bare"]):
                    cell = measure_cell(children[way][:num], args, logprobs)
                    report["cells"].append({"way": way, "logprobs": logprobs, "engines": num, **cell})
                    write(args, report)
                    print(line_of(report["cells"][-1]), flush=True)
        for way in args.ways if args.pyspy else []:
            report["profiles"][way] = profile(children[way][0], up[way][0], args, logs)
            write(args, report)
    finally:
        for child in [child for group in children.values() for child in group]:
            child.end()


def measure_cell(children: list[Child], args: argparse.Namespace, logprobs: bool) -> dict[str, Any]:
    """So many engines share the requests, several times."""
    shares = split(args.requests, len(children))
    waves = []
    with sampled_gpus() as gpus:
        for _ in range(args.repeats):
            for child, requests in zip(children, shares, strict=True):
                child.order(requests=requests, logprobs=logprobs, waves=1)
            answers = [child.answer() for child in children]
            seconds = max(one["ended"] for one in answers) - min(one["began"] for one in answers)
            waves.append({
                "tokens_per_s": sum(one["tokens"] for one in answers) / seconds,
                "front_cores": statistics.mean(one["front_cores"] for one in answers),
                "core_cores": statistics.mean(one["core_cores"] for one in answers),
            })  # fmt: skip
    medians = {name: statistics.median(wave[name] for wave in waves) for name in waves[0]}
    steps_per_s = medians["tokens_per_s"] / args.requests
    return {**medians, "step_ms": 1e3 / steps_per_s, "all": [wave["tokens_per_s"] for wave in waves], "gpus": gpus}


def split(requests: int, num: int) -> list[int]:
    """Whole groups for each engine."""
    groups = requests // GROUP
    return [GROUP * (groups // num + (place < groups % num)) for place in range(num)]


def profile(child: Child, up: dict[str, Any], args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Where the engine's EngineCore process and its front process are while it samples."""
    child.order(requests=args.requests, logprobs=True, waves=args.profile_waves)
    time.sleep(0.3)  # past the prefill
    watched = {"front": up["pid"]}
    if up["core_pids"]:  # vLLM alone on a CPU has none
        watched["engine_core"] = up["core_pids"][0]
    files = {name: logs / f"pyspy-{pid}.raw" for name, pid in watched.items()}
    spies = [
        subprocess.Popen(
            [args.pyspy, "record", "--pid", str(watched[name]), "--duration", str(PROFILE_S), "--rate",
             str(PROFILE_RATE), "--format", "raw", "--threads", "--output", str(file)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for name, file in files.items()
    ]  # fmt: skip
    for spy in spies:
        spy.wait()
    child.answer()
    return {name: functions_of(file.read_text()) for name, file in files.items() if file.exists()}


def functions_of(raw: str) -> dict[str, Any]:
    """Shares of the time that was watched, by thread and function: in it or in what it calls, and in it alone."""
    threads: Counter[str] = Counter()
    within: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, number = line.rpartition(" ")
        thread, *frames = stack.split(";")
        count = int(number)
        threads[thread] += count
        names = [frame.rsplit(":", 1)[0] for frame in frames]  # without the line
        for name in set(names):
            within[name] += count
        if frames:
            alone[frames[-1]] += count
    samples = PROFILE_S * PROFILE_RATE

    def shares(counted: Counter[str], most: int) -> dict[str, float]:
        return {name: round(count / samples, 3) for name, count in counted.most_common(most)}

    return {
        "threads": shares(threads, 8),
        "within": shares(within, NUM_FUNCTIONS),
        "alone": shares(alone, NUM_FUNCTIONS),
    }


def line_of(cell: dict[str, Any]) -> str:
    """A cell as a line of the table."""
    logprobs = "with" if cell["logprobs"] else "without"
    return (
        f"{cell['way']:<16}{cell['engines']} engines {logprobs:>8} log-probabilities"
        f"{cell['tokens_per_s']:>10,.0f} tokens/s"
        f"{cell['step_ms']:>8.1f} ms a token of each   EngineCore {cell['core_cores']:.2f} cores"
        f"   front {cell['front_cores']:.2f}"
    )


def write_sums(folder: Path) -> Path:
    """Prompts of the job."""
    draw = random.Random(1)
    path = folder / "sums.jsonl"
    with path.open("w") as file:
        for _ in range(NUM_PROMPTS):
            terms = [draw.randint(2, 60) for _ in range(draw.choice([2, 3]))]
            text = f"What is {' + '.join(map(str, terms))}? Think briefly, then end with 'Answer: ' and the number."
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}], "answer": str(sum(terms))}) + "\n")
    return path


def measure_job(args: argparse.Namespace, report: dict[str, Any], folder: Path) -> None:
    """A run for each number of workers."""
    prompts = write_sums(folder)
    for num in args.workers:
        words = [
            "experiment=quickstart_gpu", "model=checkpoint", f"model.path={args.model}", "data=files",
            f"data.path={prompts}", "data.eval_path=null", "data.max_prompt_tokens=null",
            "reward=regex", r"reward.pattern='Answer:\s*\**(-?\d+)'", "trainer.lora.rank=32", "trainer.lora.alpha=64",
            "trainer.optim.lr=1e-4", "algorithm.groups_per_step=16", "algorithm.group_size=16",
            "algorithm.max_staleness_steps=1", f"run.num_steps={args.steps}", "run.checkpoint_every_steps=0",
            "rollout.max_model_len=384", f"rollout.sampling.max_tokens={args.length}", "run.loggers=[]",
            "rollout.sampling.stop_at_eos=false", "weight_sync.transport=auto", "cluster.dashboard=false",
            f"rollout.num_workers={num}", "trainer.max_microbatch_tokens=32768", "rollout=standard",
            "rollout.max_concurrent_groups=64", f"weight_sync.watermark_bytes={1 << 30}",
            *placement_words(args, num), *args.set,
        ]  # fmt: skip
        with sampled_gpus() as gpus, sampled_cores() as cores:
            try:
                run_folder, wall_s = runs.train(f"small-{num}", words, folder)
            except subprocess.CalledProcessError as error:
                log = folder / "latest" / "run.log"
                said = log.read_text()[-4000:] if log.exists() else ""
                report["jobs"].append({"workers": num, "failed": error.returncode, "log": said})
                write(args, report)
                continue
        figures = job_figures(run_folder, args) | {"core_cores": engine_cores(run_folder, cores), "gpus": gpus}
        report["jobs"].append({"workers": num, "wall_s": wall_s, **figures})
        write(args, report)
        print(json.dumps(report["jobs"][-1]), flush=True)


@contextmanager
def sampled_cores() -> Iterator[dict[int, list[float]]]:
    """Cores that each process below this one keeps busy, second by second, in the dictionary that it yields."""
    found: dict[int, list[float]] = defaultdict(list)
    ended = threading.Event()

    def sample() -> None:
        before: dict[int, float] = {}
        while not ended.wait(1):
            now = {}
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    now[process.pid] = sum(process.cpu_times()[:2])
            for pid in now.keys() & before.keys():
                found[pid].append(now[pid] - before[pid])
            before = now

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def engine_cores(run_folder: Path, cores: dict[int, list[float]]) -> list[float]:
    """How many cores each EngineCore process of this run used in the last SAMPLED_S seconds."""
    engines = re.findall(r"its engine is process (\d+)", (run_folder / "run.log").read_text())
    return [round(statistics.median(cores[int(pid)][-SAMPLED_S:]), 2) for pid in engines if cores.get(int(pid))]


def placement_words(args: argparse.Namespace, num: int) -> list[str]:
    """Where the engines are."""
    if args.device == "cpu":
        return ["cluster.device=cpu", "model.dtype=float32", f"rollout.kv_cache_bytes={64 << 20}"]
    words = ["model.dtype=bfloat16"]
    if args.one_gpu:
        kv = (args.kv_mib << 20) // num
        return [*words, "cluster.share_gpu=true", "rollout.gpu_memory_utilization=0.05", f"rollout.kv_cache_bytes={kv}"]
    return words + ([f"rollout.workers_per_gpu={num}"] if num > 1 else [])


def job_figures(run_folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians and tokens/s of the steps that come after the warm-up."""
    rows = [row for row in runs.read_rows(run_folder) if row["step"] > args.warm_up]
    parts = {
        "step_s": "step/total_s", "wait_s": "rollout/wait_s", "forward_backward_s": "trainer/forward_backward_s",
        "optimizer_s": "trainer/optimizer_s", "publish_s": "sync/total_s", "pause_s": "sync/pause_s",
        "response_tokens": "rollout/response_tokens_mean", "k3": "parity/k3",
    }  # fmt: skip
    told = {name: [row[key] for row in rows if row.get(key) is not None] for name, key in parts.items()}
    found = {name: statistics.median(values) for name, values in told.items() if values}
    tokens = num_responses(run_folder) * sum(row["rollout/response_tokens_mean"] for row in rows)
    return {"tokens_per_s": tokens / sum(row["step/total_s"] for row in rows), **found, "num_steps": len(rows)}


def write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """After every figure: what comes later may be cut."""
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["engines", "job"])
    parser.add_argument("--model", type=Path, required=True, help="folder of a small model")
    parser.add_argument("--requests", type=int, default=512, help="in flight, over all engines")
    parser.add_argument("--length", type=int, default=128, help="tokens of every response")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-mib", type=int, default=4096, help="of an engine's cache; with --one-gpu of all together")
    parser.add_argument("--pyspy", help="py-spy's file")
    parser.add_argument("--profile-waves", type=int, default=5, help="waves while py-spy watches")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 3], help="engines of a job, on one GPU")
    parser.add_argument("--one-gpu", action="store_true", help="cluster.share_gpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[], help="further options of a job")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts = environment(args.commit)
    args.device = "cuda" if facts["gpus"] else "cpu"
    kind = "gpu" if facts["gpus"] else "cpu"
    args.out = args.out or ROOT / "bench" / "results" / f"small_model-{args.mode}-{kind}.json"
    options = {name: str(value) for name, value in vars(args).items() if name not in ("out", "pyspy")}
    report = {"environment": facts, "options": options}
    with tempfile.TemporaryDirectory(prefix="small-model-") as folder:
        if args.mode == "engines":
            report |= {"up_s": {}, "cells": [], "profiles": {}}
            logs = args.out.parent / f"{args.out.stem}-logs"
            logs.mkdir(exist_ok=True)
            measure_engines(args, report, logs)
        else:
            report |= {"jobs": []}
            measure_job(args, report, Path(folder))
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
