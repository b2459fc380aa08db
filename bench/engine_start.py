"""How long an engine takes to start, by what it is told to measure and capture, and how fast it then samples.

    python bench/engine_start.py                 all of Qwen3-30B-A3B's shape, random weights, one GPU
    python bench/engine_start.py --tiny          two small layers; runs on a CPU, where no graphs are captured

Every row is a process of its own, one after the other, with the product's arguments of an engine (rollout.engine) and
vLLM's compiled model from disk: a first row, `compiles`, makes it and is not compared. `as it is` is the product's;
`decode graphs` captures graphs for decoding alone, so that batches with prompts run compiled, but launch by launch;
`known cache` is told the bytes of the KV cache that the first row measured. Seconds are from the engine's start, after
vLLM's import, to the end of start; then the time to a first token, and tokens per second of --requests at once, of
which every one has a prompt of its own. Writes bench/results/engine_start-<device>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from bench.shapes import add_shape_options, model_config, shrink  # noqa: E402

DECODE = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "compiles": ({}, False),
    "as it is": ({}, False),
    "decode graphs": (DECODE, False),
    "known cache": ({}, True),
    "both": (DECODE, True),
}
"""rollout.engine_options of a row, and whether it knows the KV cache's size."""


async def run_row(args: argparse.Namespace) -> dict[str, Any]:
    """Start, sample, end."""
    from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
    from slipstream.rollout.engine.vllm_engine import VllmEngine

    options, _ = ROWS[args.row]
    device = Device.cuda if args.device == "cuda" else Device.cpu
    sampling = SamplingConfig(max_tokens=args.length, stop_at_eos=False)
    config = RolloutConfig(
        sampling=sampling,
        max_model_len=args.prompt + args.length,
        max_num_seqs=args.requests,
        gpu_memory_utilization=0.85,
        kv_cache_bytes=args.cache_bytes,
        engine_options=options if device is Device.cuda else {},
    )
    engine = VllmEngine(args.folder, config, dtype=DType(args.dtype), device=device, seed=0)
    await engine.prepare()
    began = time.perf_counter()
    await engine.start()
    row: dict[str, Any] = {"start_s": time.perf_counter() - began}

    async def sample(index: int, length: int) -> int:
        prompt = [1 + (index * 31 + place) % (args.vocab - 2) for place in range(args.prompt)]
        rollouts = await engine.generate_group(prompt, 1, replace(sampling, max_tokens=length))
        return sum(len(rollout.token_ids) for rollout in rollouts)

    began = time.perf_counter()
    await sample(0, 1)
    row["first_token_s"] = time.perf_counter() - began
    row["tokens_per_s"] = []
    for repeat in range(3):  # the first warms up
        began = time.perf_counter()
        numbers = await asyncio.gather(*(sample(repeat * args.requests + i, args.length) for i in range(args.requests)))
        row["tokens_per_s"].append(sum(numbers) / (time.perf_counter() - began))
    engine.shutdown()
    return row


def cache_bytes_of(log: str) -> int | None:
    """The bytes of the KV cache that vLLM says it measured."""
    for line in log.splitlines():
        if "Available KV cache memory:" in line:
            return int(float(line.split("Available KV cache memory:")[1].split()[0]) * (1 << 30))
    return None


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, rank=None)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=256, help="tokens of a response")
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a CPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    for hidden, kind in (("--row", str), ("--folder", Path), ("--cache-bytes", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dtype = "bfloat16"
    if args.tiny:
        args.rank = 0
        shrink(args)
        args.requests, args.prompt, args.length, args.dtype = 4, 8, 8, "float32"
        args.head_dim = 32
    return args


def main() -> None:
    """Run the rows one after the other."""
    args = parse()
    import torch

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.row:
        args.out.write_text(json.dumps(asyncio.run(run_row(args))))
        return
    out = args.out or ROOT / "bench" / "results" / f"engine_start-{'gpu' if args.device == 'cuda' else 'cpu'}.json"
    given = {name: value for name, value in vars(args).items() if name not in ("out", "commit", "folder")}
    report: dict[str, Any] = {"environment": environment(args.commit), "arguments": given, "rows": {}}
    print(json.dumps(report["environment"]), flush=True)
    known: int | None = None
    print(f"{'':16}{'start s':>9}{'token s':>9}{'tokens/s':>22}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model_config(args)))
        for name in args.rows:
            part, log = Path(folder, "part.json"), Path(folder, "log")
            part.unlink(missing_ok=True)
            words = [sys.executable, __file__, *sys.argv[1:], "--row", name, "--folder", folder, "--out", str(part)]
            if ROWS[name][1] and known is not None:
                words += ["--cache-bytes", str(known)]
            with log.open("w") as stream:
                subprocess.run(words, stdout=stream, stderr=subprocess.STDOUT, check=False)
            known = known or cache_bytes_of(log.read_text())
            if not part.exists():
                print(log.read_text()[-3000:])
                sys.exit(f"{name} failed")
            row = report["rows"][name] = json.loads(part.read_text()) | {"log": stamped(log.read_text())}
            rates = " ".join(f"{rate:.0f}" for rate in row["tokens_per_s"])
            print(f"{name:16}{row['start_s']:>9.2f}{row['first_token_s']:>9.2f}{rates:>22}", flush=True)
            out.write_text(json.dumps(report, indent=1, default=str) + "\n")


def stamped(log: str) -> list[str]:
    """vLLM's own lines with a time, which say where a start's seconds go."""
    lines = [line[:160] for line in log.splitlines() if "INFO" in line][-60:]
    return [re.sub(r"\S*/(vllm/|\.cache/)", r"\1", line) for line in lines]  # without folders of the machine


if __name__ == "__main__":
    main()
