"""Whole GRPO jobs beside a bare engine and other trainers: response tokens/s, and who waits for whom.

    python bench/loop.py                                    Qwen3-30B-A3B's shape, a host with two GPUs
    python bench/loop.py --shape dense-8b --length 512
    python bench/loop.py --shape qwen3-30b --layers 4 --one-gpu      trainer and engine take turns at one GPU
    python bench/loop.py --shape dense-8b --one-gpu --rows merged adapter trl trl-sleep
    python bench/loop.py --tiny                             two small dense layers, two CPU cores

Rows, one after the other, each in processes of its own:

    bare      vLLM alone (LLM.generate, the run's engine options), with each of --concurrency requests at once
    merged    `slipstream train`, engines with merged weights
    merged-kept   the same, the trainer keeps activations of smaller microbatches instead of computing them again
    merged-kv, merged-kept-kv    engines keep the KV cache of requests in flight across a publish (pause_mode=keep_kv)
    merged-own-host, merged-own-gpu    engines merge for themselves (weight_sync.remote_merge); the weights lie on disk
    adapter   as merged, engines with the base and adapters in slots
    trl       TRL's GRPOTrainer with PEFT, if it is installed (bench/loops/trl_row.py), vLLM colocated on one GPU
    trl-sleep     the same; vLLM gives its memory back while the trainer works
    trl-server    the same, vLLM as a server on a second GPU
    verl      verl's colocated trainer on all GPUs, if --verl names the folder of its packages (bench/loops/verl_row.py)
    verl-async    its fully_async: a trainer and an engine on a GPU each

All rows sample responses without an end to prompts of 5 tokens; weights are random. A response has --length tokens, or
with --lengths long-tailed a tenth of them, and one in eight has them all: each gets a max_tokens of its own in vLLM, by
the same patch in all rows (bench/loops/long_tailed).
A job trains --responses of them per step (groups of 16), LoRA r=32 on all linears and experts, adapters and moments
in float32; ours with staleness --staleness. The engine's tokens/s are of fleet.jsonl, those of unfinished responses
included, without the first two batches and those of the end, when no further batch may begin (a peer's from the second
step on); a colocated peer's are those of the seconds in which it samples. `trained` are response tokens of the batches
over the seconds of their steps, the first two left out (a peer's first). Busy shares of GPUs are
nvidia-smi's, sampled once a second in the later half of a row. Rows that --out already has, of the same environment and
options, are kept. Prints its environment and tables; writes bench/results/loop-<shape>-<device>.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.loops.lengths import FIXED, LONG_TAILED  # noqa: E402
from bench.loops.row_process import Job, measure, python_path, sampled_gpus  # noqa: E402
from bench.parity_shapes import COMMON, QWEN3_8B, QWEN3_30B  # noqa: E402
from slipstream.conf.schema import Device  # noqa: E402
from slipstream.rollout.engine.engine_options import engine_environment  # noqa: E402

SHAPES: dict[str, tuple[dict[str, Any], int]] = {"qwen3-30b": (QWEN3_30B, 48), "dense-8b": (QWEN3_8B, 36)}
"""config.json without layers, and how many of them the model has."""
TINY = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 128}  # fmt: skip
GROUP = 16
PROMPT_TOKENS = 5
WARM_UP_STEPS, PEER_WARM_UP_STEPS = 2, 1
RANK, LEARNING_RATE, MICROBATCH_TOKENS = 32, 1e-4, 32768
MERGED = ["weight_sync.mode=merged"]
KEPT = [*MERGED, "trainer.activations=keep", "trainer.max_microbatch_tokens=13568"]
KEEP_KV = "weight_sync.pause_mode=keep_kv"
OWN = ["model.init=checkpoint"]
RUNS = {
    "merged": MERGED,
    "merged-kv": [*MERGED, KEEP_KV],
    "merged-kept": KEPT,
    "merged-kept-kv": [*KEPT, KEEP_KV],
    "merged-kept-kv-fp8": [*KEPT, KEEP_KV, "model.engine_format=block_fp8"],
    "merged-own-host": [*MERGED, *OWN, "weight_sync.remote_merge=host"],
    "merged-own-gpu": [*MERGED, *OWN, "weight_sync.remote_merge=gpu"],
    "adapter": ["weight_sync.mode=adapter"],
}
"""Options of the rows that are runs of ours, over those of run_options."""
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "trl": ("bench.loops.trl_row", {}),
    "trl-sleep": ("bench.loops.trl_row", {"sleeps": True}),
    "trl-server": ("bench.loops.trl_row", {"has_server": True}),
    "verl": ("bench.loops.verl_row", {}),
    "verl-async": ("bench.loops.verl_row", {"is_async": True}),
}
"""The module that runs a peer's row, and what the row adds to its job."""
LONG_TAILED_ENGINES = ROOT / "bench" / "loops" / "long_tailed"
PARTS = {
    "waits for the batch": "rollout/wait_s",
    "forward and backward": "trainer/forward_backward_s",
    "optimizer": "trainer/optimizer_s",
    "publish": "sync/total_s",
}
"""What a trainer's step is made of, and the metric of each."""


def model_of(args: argparse.Namespace) -> dict[str, Any]:
    shape, layers = SHAPES[args.shape]
    config = COMMON | shape | (TINY if args.tiny else {})
    architecture = "Qwen3MoeForCausalLM" if config["model_type"] == "qwen3_moe" else "Qwen3ForCausalLM"
    return config | {"architectures": [architecture], "num_hidden_layers": args.layers or layers}


def run_options(args: argparse.Namespace, row: str, model: Path) -> list[str]:
    """The words after `slipstream train`."""
    words = [
        "experiment=qwen3_moe_2gpu", "model=checkpoint", "model.init=random", f"model.path={model}",
        "model.tokenizer=characters", f"model.dtype={'float32' if args.tiny else 'bfloat16'}",
        f"data.max_prompt_tokens={PROMPT_TOKENS}", f"run.num_steps={args.steps}", "data.eval_path=null",
        f"rollout.max_model_len={longest(args)}", f"rollout.sampling.max_tokens={args.length}",
        f"trainer.lora.rank={RANK}", f"trainer.lora.alpha={2 * RANK}", f"trainer.optim.lr={LEARNING_RATE}",
        f"trainer.max_microbatch_tokens={MICROBATCH_TOKENS}", "reward.kind=bench.loops.reward:is_even",
        "rollout.sampling.stop_at_eos=false", f"algorithm.groups_per_step={args.responses // GROUP}",
        f"algorithm.group_size={GROUP}", f"algorithm.max_staleness_steps={args.staleness}",
        *RUNS[row], *args.set,
    ]  # fmt: skip
    if args.one_gpu:
        words += ["cluster.share_gpu=true", f"rollout.kv_cache_bytes={kv_cache_bytes(args, args.staleness + 1)}"]
        words += ["rollout.gpu_memory_utilization=0.4"]
    elif not args.tiny:
        words += [f"rollout.gpu_memory_utilization={args.gpu_memory}"]
    if args.tiny:
        words += ["cluster.device=cpu", "weight_sync.transport=auto", f"rollout.kv_cache_bytes={64 << 20}"]
    return words


def longest(args: argparse.Namespace) -> int:
    """Tokens of a prompt and its response, rounded up to whole KV blocks."""
    return -(-(PROMPT_TOKENS + args.length + 1) // 16) * 16


def kv_cache_bytes(args: argparse.Namespace, batches: int) -> int:
    """Room for that many batches at their longest, but at most --kv-gib, where trainer and engine share a GPU."""
    config = model_of(args)
    head_dim, heads = config["head_dim"], config["num_key_value_heads"]
    token = 2 * config["num_hidden_layers"] * heads * head_dim * (4 if args.tiny else 2)
    return min(int(args.kv_gib * (1 << 30)), batches * args.responses * longest(args) * token)


def job_of(args: argparse.Namespace, model: Path) -> Job:
    """What rows other than a run are asked for."""
    return Job(
        model=str(model),
        device="cpu" if args.tiny else "cuda",
        responses=args.responses,
        group=GROUP,
        prompt_tokens=PROMPT_TOKENS,
        length=args.length,
        lengths=args.lengths,
        max_model_len=longest(args),
        steps=args.steps,
        warm_up=WARM_UP_STEPS,
        microbatch_tokens=MICROBATCH_TOKENS,
        rank=RANK,
        lr=LEARNING_RATE,
        kv_cache_bytes=kv_cache_bytes(args, 1),
        staleness=args.staleness,
        num_gpus=1 if args.one_gpu or args.tiny else 2,
        peer_seconds=args.peer_seconds,
    )


def measure_bare(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """An engine of its own, by concurrency."""
    job = replace(
        job_of(args, model),
        concurrency=tuple(args.concurrency),
        steps=args.repeats,
        kv_cache_bytes=(64 << 20) if args.tiny else None,
        gpu_memory_utilization=args.gpu_memory,
    )
    found = measure("bench.loops.bare_row", job, os.environ | {"PYTHONPATH": python_path()})
    if "failed" in found:
        return {"all": found}
    told = {"up_s": found["up_s"], "gpus": found["gpus"]}
    return {num: told | {"engine_tokens_per_s": rate} for num, rate in found["engine_tokens_per_s"].items()}


def measure_peer(args: argparse.Namespace, row: str, model: Path) -> dict[str, Any]:
    """A peer's whole job. Its engine gets the environment of ours; a variable that is set keeps its value. TRL
    sees one GPU: with more, transformers would split batches over them.
    """
    module, changes = PEERS[row]
    started = time.monotonic()
    variables = engine_environment(Device.cpu if args.tiny else Device.cuda) | dict(os.environ)
    steps = args.peer_steps or args.steps
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    job = replace(job_of(args, model), steps=steps, warm_up=PEER_WARM_UP_STEPS, server_gpu=gpus[-1], **changes)
    is_verl = module == "bench.loops.verl_row"
    first = [LONG_TAILED_ENGINES] if args.lengths == LONG_TAILED else []
    first += [args.verl] if is_verl and args.verl else []
    devices = ",".join(gpus[: job.num_gpus if is_verl else 1])
    found = measure(module, job, variables | {"PYTHONPATH": python_path(*first), "CUDA_VISIBLE_DEVICES": devices})
    if "first_step_at" in found:
        found["first_step_s"] = found.pop("first_step_at") - started
    return found | {"wall_s": time.monotonic() - started}


def measure_run(args: argparse.Namespace, row: str, model: Path, folder: Path) -> dict[str, Any]:
    """One whole run, in processes of its own."""
    words = [*run_options(args, row, model), f"run.dir={folder}", f"run.name={row}"]
    started, first_step_s = time.monotonic(), None
    with sampled_gpus() as gpus:
        command = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "train", *words]
        changed = [LONG_TAILED_ENGINES] if args.lengths == LONG_TAILED else []
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path(*changed)})
        while process.poll() is None:
            if first_step_s is None and any(b'"step": 1,' in file.read_bytes() for file in rows_of(folder, row)):
                first_step_s = time.monotonic() - started
            time.sleep(0.5)
    if process.returncode:
        return {"failed": f"exit code {process.returncode}"}
    (run,) = (file.parent for file in rows_of(folder, row))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fleet = [json.loads(line) for line in (run / "fleet.jsonl").read_text().splitlines()]
    told = {"first_step_s": first_step_s, "wall_s": time.monotonic() - started, "gpus": gpus}
    starts = [json.loads(line) for line in (run / "startup.jsonl").read_text().splitlines()]
    of_steps = [{name: row.get(name) for name in ("step", "step/total_s", *PARTS.values())} for row in rows]
    return told | figures(rows, fleet, args.staleness) | {"rows": of_steps, "starts": starts}


def rows_of(folder: Path, row: str) -> list[Path]:
    """The run's metrics, once they exist."""
    return list(folder.glob(f"{row}-2*/metrics.jsonl"))


def figures(rows: Sequence[Mapping[str, Any]], fleet: Sequence[Mapping[str, Any]], staleness: int) -> dict[str, Any]:
    """What a run's files say about its steps after the first two."""
    steps = [row for row in rows if row["step"] > WARM_UP_STEPS]
    seconds = sum(row["step/total_s"] for row in steps)
    tokens = sum(row["rollout/tokens_per_s"] * row["step/total_s"] for row in steps)
    parts = {name: sum(row[key] or 0.0 for row in steps) / seconds for name, key in PARTS.items()}
    k3 = [row[key] for row in steps for key in ("parity/k3", "parity/k3_stale") if row[key] is not None]
    return {
        "steps": len(steps),
        "step_s": statistics.median(row["step/total_s"] for row in steps),
        "trained_tokens_per_s": tokens / seconds,
        "engine_tokens_per_s": engine_tokens_per_s(
            fleet, WARM_UP_STEPS / rows[-1]["step"], 1.0 - staleness / rows[-1]["step"]
        ),
        "parts": parts | {"rest": max(0.0, 1.0 - sum(parts.values()))},
        "publish_s": statistics.median(row["sync/total_s"] for row in steps),
        "pause_s": statistics.median(row["sync/pause_s"] for row in steps),
        "k3": statistics.median(k3) if k3 else None,
        "trainer_peak_gb": max((row["trainer/peak_device_bytes"] or 0 for row in steps), default=0) / 1e9,
    }


def engine_tokens_per_s(fleet: Sequence[Mapping[str, Any]], first: float, last: float) -> float | None:
    """Response tokens/s of all workers, each between the moments at which it had sampled these shares of its tokens.

    None: a worker reported fewer than two numbers of tokens, or the shares are none.
    """
    reports: dict[int, dict[int, float]] = {}
    for row in fleet:
        if row["event"] == "tokens":
            reports.setdefault(row["worker"], {}).setdefault(row["tokens"], row["time"])
    if last - first < 1e-6 or any(len(mine) < 2 for mine in reports.values()):
        return None
    total = 0.0
    for mine in reports.values():
        tokens, times = sorted(mine), [mine[count] for count in sorted(mine)]
        begin, end = first * tokens[-1], last * tokens[-1]
        total += (end - begin) / float(np.interp(end, tokens, times) - np.interp(begin, tokens, times))
    return total if reports else None


def print_tables(report: Mapping[str, Any]) -> None:
    """Engines alone, then runs beside the best of them."""
    best = max((row.get("engine_tokens_per_s", 0.0) for row in report["bare"].values()), default=0.0)
    for concurrency, row in report["bare"].items():
        told = row.get("failed") or f"{row['engine_tokens_per_s']:,.0f} response tokens/s, up in {row['up_s']:.0f} s"
        print(f"bare engine, {concurrency} at once: {told}")
    for mode, row in report["runs"].items():
        if "failed" in row:
            print(f"{mode}: {row['failed']}")
            continue
        engine = row["engine_tokens_per_s"]
        share = f" ({engine / best:.0%} of the best bare engine)" if engine and best else ""
        print(
            f"{mode}: {row['trained_tokens_per_s']:,.0f} trained tokens/s, engine {engine or 0:,.0f}{share}; step "
            f"{row['step_s']:.2f} s, publish {row['publish_s']:.3f} s (pause {row['pause_s']:.3f}); first step after "
            f"{row['first_step_s']:.0f} s; k3 {row['k3'] or 0:.2g}; trainer's peak {row['trainer_peak_gb']:.1f} GB"
        )
        if "uncorrected" in row:
            other = row["uncorrected"]
            print(
                f"    without the correction: {other['trained_tokens_per_s']:,.0f} trained tokens/s, step "
                f"{other['step_s']:.2f} s"
            )
        print("    " + ", ".join(f"{name} {part:.0%}" for name, part in row["parts"].items()))
        for index, gpu in row["gpus"].items():
            print(f"    GPU {index}: busy {gpu['busy']:.0f} %, at most {gpu['mib'] / 1024:.0f} GiB")


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--rows", nargs="*", choices=("bare", *RUNS, *PEERS), default=["bare", "merged", "adapter"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[256, 512], help="requests of a bare engine")
    parser.add_argument("--responses", type=int, default=256, help="of a step; a multiple of 16")
    parser.add_argument("--length", type=int, default=512, help="tokens of a response, at most")
    parser.add_argument("--lengths", choices=(FIXED, LONG_TAILED), default=FIXED)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peer-steps", type=int, help="instead of --steps; a peer's steps hardly differ")
    parser.add_argument("--peer-seconds", type=float, default=3600.0, help="after which a peer is ended as it is")
    parser.add_argument("--repeats", type=int, default=3, help="of a bare engine")
    parser.add_argument("--one-gpu", action="store_true", help="cluster.share_gpu")
    parser.add_argument("--kv-gib", type=float, default=40.0, help="the most for a KV cache, with --one-gpu")
    parser.add_argument("--gpu-memory", type=float, default=0.85, help="rollout.gpu_memory_utilization, on two GPUs")
    parser.add_argument("--verl", type=Path, help="folder with verl and what it needs in versions of its own")
    parser.add_argument("--set", nargs="*", default=[], help="further options of every run")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--folder", type=Path, help="keep the model and the runs there")
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.layers, args.concurrency = "dense-8b", 2, [16, 32]
        args.responses, args.length, args.steps = 32, 64, max(args.steps, 24)
    if args.responses % GROUP:
        parser.error(f"--responses={args.responses} is no multiple of {GROUP}")
    return args


def keep_former_rows(report: dict[str, Any], out: Path) -> None:
    """Take rows over from a file of the same environment and options."""
    before = json.loads(out.read_text()) if out.exists() else {}
    told = [
        {name: value for name, value in one.get("arguments", {}).items() if name not in ("rows", "peer_seconds")}
        for one in (before, report)
    ]
    if before.get("environment") == report["environment"] and told[0] == told[1]:
        report["bare"], report["runs"] = before["bare"], before["runs"]


def main() -> None:
    """Measure the rows, and keep what there is after each."""
    args = parse()
    report: dict[str, Any] = {"environment": environment(args.commit), "bare": {}, "runs": {}}
    report["arguments"] = {name: str(value) for name, value in vars(args).items()}
    print(json.dumps(report["environment"]), flush=True)
    device = "gpu" if report["environment"]["gpus"] else "cpu"
    out: Path = args.out or RESULTS / f"loop-{'tiny' if args.tiny else args.shape}-{device}.json"
    keep_former_rows(report, out)
    with ExitStack() as stack:
        made = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loop-")))
        model = made / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(model_of(args)))
        if any(OWN[0] in RUNS.get(row, ()) for row in args.rows):
            from bench.random_checkpoint import write_checkpoint  # needs what an engine needs

            write_checkpoint(model, model_of(args))
        for row in args.rows:
            if row == "bare":
                report["bare"] = measure_bare(args, model)
            elif row in PEERS:
                report["runs"][row] = measure_peer(args, row, model)
            else:
                report["runs"][row] = measure_run(args, row, model, made)
            write_report(out, report)
    print_tables(report)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
