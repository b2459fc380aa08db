"""From safetensors on disk to engines that serve: `slipstream push`, its parts alone, and a plain vLLM load.

    python bench/push.py --layers 24                     half of Qwen3-30B-A3B's layers: 31 GB, one GPU, 64 GB of disk
    python bench/push.py                                 all 48: 61 GB
    python bench/push.py --folder F --parts disk publish, then --parts starts       the same as two commands
    python bench/push.py --layers 2 --experts 4 --hidden 64 --heads 4 --width 32 --head-dim 16 --vocab 500       a CPU

All use one checkpoint of random bfloat16 weights (written once into --folder, while vLLM starts for the first time):

    h2d        page-locked host memory to the device, 1 GiB at a time: the bound of the offloaded publish
    disk       only this product's read, with the page cache dropped before; then one file again, from the cache
    publish    from page-locked host memory into a process with vLLM's parameter layout, hashes on, median
    dummy      `vllm serve` with dummy weights, until it answers
    push       `slipstream push --start 1`, until the engine serves the checkpoint; page cache dropped
    plain      `vllm serve` that loads the checkpoint, until it answers; page cache dropped

The first start fills vLLM's caches of compiled kernels and is not compared. The page cache is dropped with
posix_fadvise(DONTNEED), and what stays resident is measured (mincore) and reported. If a file system keeps pages, or a
sandbox reports every page as resident, "disk" may not be the disk's rate; compare it with the cache's rate to find out.
Every figure is printed as soon as it is known, and kept in bench/results/push-<device>.json. A later command for the
same commit and model adds its parts there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.random_checkpoint import begin_checkpoint, drop_cache, write_checkpoint  # noqa: E402
from bench.shapes import add_shape_options, model_config  # noqa: E402
from bench.sync.engine_process import KEY, EngineSpec, run_engine  # noqa: E402

MIB = 1 << 20
PARTS = ["disk", "publish", "starts"]

START_TIMEOUT_S = 240.0
BEGAN = time.monotonic()


class Figures:
    """Prints every figure as soon as it is known, and keeps it in a file."""

    def __init__(self, file: Path, facts: dict[str, Any]) -> None:
        self._file = file
        known = json.loads(file.read_text()) if file.is_file() else {}
        is_same = all(known.get(name) == fact for name, fact in facts.items())
        self.all: dict[str, Any] = (known if is_same else {}) | facts

    def keep(self, name: str, figure: Any, text: str) -> None:
        """Print and keep one more figure."""
        self.all[name] = figure
        write_report(self._file, self.all)
        print(f"[{time.monotonic() - BEGAN:6.1f} s]  {text}", flush=True)


def measure_h2d(device: str, num_bytes: int) -> float | None:
    """GB/s of one large copy from page-locked memory; None on CPUs."""
    if device == "cpu":
        return None
    import torch

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return num_bytes / statistics.median(seconds[2:]) / 1e9


def read_disk(folder: Path, num_threads: int) -> tuple[dict[str, Any], Any]:
    """Read cold, and one file once more. Returns figures, and the checkpoint that was read, for the publish."""
    from slipstream.weight_sync.disk.safetensors_source import CHUNK_BYTES, Checkpoint

    resident = drop_cache(folder)
    checkpoint = Checkpoint(folder, num_threads=num_threads)
    report = checkpoint.read()
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    buffers = threading.local()

    def read_again(offset: int) -> int:
        if not hasattr(buffers, "own"):
            buffers.own = bytearray(CHUNK_BYTES)
        file = os.open(path, os.O_RDONLY)
        try:
            return os.preadv(file, [buffers.own], offset)
        finally:
            os.close(file)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read_again, range(0, path.stat().st_size, CHUNK_BYTES)))  # threads and buffers already exist
        began = time.perf_counter()
        num_bytes = sum(pool.map(read_again, range(0, path.stat().st_size, CHUNK_BYTES)))
        cached_s = time.perf_counter() - began
    figures = {
        "threads": num_threads,
        "num_bytes": report.num_bytes,
        "seconds": report.seconds,
        "gb_per_s": report.num_bytes / report.seconds / 1e9,
        "resident_before": resident,
        "pinned_bytes": report.pinned_bytes,
        "cached_gb_per_s": num_bytes / cached_s / 1e9,
    }
    return figures, checkpoint


def measure_publish(checkpoint: Any, config: dict[str, Any], device: str, args: Any) -> dict[str, Any]:
    """Publish from host memory into plain memory of another process."""
    from slipstream.conf.schema import WeightSyncConfig
    from slipstream.weight_sync.api import Sender
    from slipstream.weight_sync.gc_freeze import freeze_heap

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=run_engine, args=(EngineSpec("plain", config, device), theirs), daemon=True)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "1" if args.other_gpu else "0"
    process.start()
    if seen is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = seen
    try:
        while not pipe.poll(5):
            if not process.is_alive():
                raise RuntimeError(f"the engine's process ended with code {process.exitcode}")
        sync = WeightSyncConfig(watermark_bytes=args.watermark_mib * MIB)
        began = time.perf_counter()
        sender = Sender(checkpoint.source, [pipe.recv()], key=KEY, device=device, config=sync)
        freeze_heap()
        connect_s, reports = time.perf_counter() - began, []
        for version in range(args.publishes + 1):
            report = sender.update(version)
            if report.num_committed != 1:
                raise RuntimeError(report.replicas[0].error)
            reports.append(report)
        measured = reports[1:]
        link, num_bytes = sender.link, measured[0].num_bytes
        sender.close()
        pipe.send(("end",))
    finally:
        process.join(20)
        process.kill()
    total_s = statistics.median(report.total_s for report in measured)
    return {
        "link": link,
        "num_bytes": num_bytes,
        "connect_s": connect_s,
        "prepare_s": statistics.median(report.prepare_s for report in measured),
        "write_s": statistics.median(report.write_s for report in measured),
        "total_s": total_s,
        "gb_per_s": num_bytes / total_s / 1e9,
        "peak_bytes": measured[0].peak_bytes,
        "watermark_bytes": measured[0].watermark_bytes,
    }


def measure_server(folder: Path, device: str, words: list[str], log: Path) -> float:
    """Seconds until `vllm serve` with these arguments answers; it is ended then."""
    from slipstream.conf.schema import Device
    from slipstream.rollout.served.client import ServedEngine
    from slipstream.rollout.served.serve import VLLM_MODULE
    from slipstream.rollout.served.servers import server_environment

    engine = ServedEngine("http://127.0.0.1:8711")
    command = [sys.executable, "-m", VLLM_MODULE, "--model", str(folder), "--port", "8711"]
    command += [
        "--host",
        "127.0.0.1",
        "--skip-tokenizer-init",
        "--moe-backend",
        "auto" if device == "cpu" else "triton",
    ]
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *words],
            env=server_environment(Device(device), [], os.environ),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not engine.is_healthy():
            if process.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                raise RuntimeError(f"vllm serve did not come up: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        return time.perf_counter() - began
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # also ends the engine, which is in the same session
        process.wait(20)


def measure_push(folder: Path, args: Any, words: list[str], log_dir: Path) -> dict[str, Any]:
    """Run the command as a user types it."""
    command = [
        sys.executable,
        "-m",
        "slipstream.orchestrator.cli.main",
        "push",
        str(folder),
        "--start",
        "1",
        "--port",
        "8712",
        "--once",
    ]
    command += ["--json", "--log-dir", str(log_dir), "--threads", str(args.threads)]
    command += ["--watermark-mib", str(args.watermark_mib), "--", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    began = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"slipstream push ended with {done.returncode}: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    del report["checkpoint"]  # a path of this machine
    return report | {"command_s": time.perf_counter() - began}


def serve_words(device: str, args: Any) -> list[str]:
    """Arguments of the command that all starts share."""
    words = ["--max-model-len", str(args.max_model_len), *args.serve]
    if device == "cpu":
        words += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 * MIB)]
    return words


def measure_starts(folder: Path, device: str, args: Any, scratch: Path, figures: Figures) -> None:
    """Measure dummy, push and plain."""
    words = serve_words(device, args)
    figures.keep("serve_words", words, f"vllm serve {' '.join(words)}")
    dummy_s = measure_server(folder, device, ["--load-format", "dummy", *words], scratch / "1")
    figures.keep("dummy_s", dummy_s, f"dummy start       {dummy_s:8.2f} s")
    resident = drop_cache(folder)
    push: dict[str, Any] = measure_push(folder, args, words, scratch / "push-logs") | {"resident_before": resident}
    figures.keep("push", push, f"slipstream push   {push['serving_s']:8.2f} s, {resident:.0%} cached before")
    for name in ("disk_done_s", "expected_s", "engines_up_s", "attached_s", "plan_s", "connect_s", "publish_s"):
        print(f"            {name:<16} {push[name]:8.2f} s", flush=True)
    steps = " + ".join(f"{name} {seconds:.2f}" for name, seconds in push["attach_s"].items())
    print(f"            attach: {steps}; {push['num_expected']} as expected {push['expected_error']}", flush=True)
    if disk := figures.all.get("disk"):
        bound_s = max(dummy_s, disk["seconds"])
        over_s = push["serving_s"] - bound_s
        figures.keep("push_over_bound_s", over_s, f"max(dummy, disk)  {bound_s:8.2f} s, push {over_s:+.2f} s")
    resident = drop_cache(folder)
    plain_s = measure_server(folder, device, words, scratch / "2")
    plain = {"seconds": plain_s, "resident_before": resident}
    figures.keep("plain", plain, f"plain vLLM load   {plain_s:8.2f} s, {resident:.0%} cached before")


def measure_memory(folder: Path, config: dict[str, Any], device: str, args: Any, figures: Figures) -> None:
    """Measure disk, h2d and publish, which share the memory into which the checkpoint is read."""
    disk, checkpoint = read_disk(folder, args.threads)
    text = f"disk              {disk['seconds']:8.2f} s {disk['gb_per_s']:8.2f} GB/s, {args.threads} threads, "
    text += f"{disk['resident_before']:.0%} cached before; the cache itself {disk['cached_gb_per_s']:.2f} GB/s"
    figures.keep("disk", disk, text)
    if "publish" not in args.parts:
        return
    h2d = measure_h2d(device, 1024 * MIB)
    figures.keep("h2d_gb_per_s", h2d, "h2d               " + (f"{h2d:19.2f} GB/s" if h2d else "none on a CPU"))
    publish = measure_publish(checkpoint, config, device, args)
    bound = f", {publish['gb_per_s'] / h2d:.0%} of h2d" if h2d else ""
    text = f"publish ({publish['link']}) {publish['total_s']:14.3f} s {publish['gb_per_s']:8.2f} GB/s{bound}"
    figures.keep("publish", publish, text)


def main() -> None:
    """Entry point."""
    parser = command_line(__doc__)
    add_shape_options(parser, rank=None)
    for name, value in (("publishes", 5), ("watermark-mib", 1024), ("max-model-len", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=8, help="of reading")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is written; a temporary one")
    parser.add_argument("--other-gpu", action="store_true", help="publish to a process on GPU 1 instead of GPU 0")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="publish needs disk")
    parser.add_argument(
        "--serve", nargs="*", default=[], help="further words for vllm serve; with dashes: --serve=--enforce-eager"
    )
    args = parser.parse_args()
    if "publish" in args.parts and "disk" not in args.parts:
        parser.error("--parts publish sends what --parts disk has read; give both")

    import torch

    device = "cuda" if torch.cuda.device_count() else "cpu"
    config = model_config(args)
    out: Path = args.out or RESULTS / f"push-{'gpu' if device == 'cuda' else 'cpu'}.json"
    figures = Figures(out, {"environment": environment(args.commit), "config": config})
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as scratch:
        folder = args.folder or Path(scratch) / "checkpoint"
        begin_checkpoint(folder, config)
        with ThreadPoolExecutor(1) as first:
            starting: Future[float] | None = None
            if "starts" in args.parts:
                words = ["--load-format", "dummy", *serve_words(device, args)]
                starting = first.submit(measure_server, folder, device, words, Path(scratch) / "0")
            if written := write_checkpoint(folder, config):
                text = f"checkpoint written{written['seconds']:8.2f} s {written['gb_per_s']:8.2f} GB/s, fsync included"
                figures.keep("write_checkpoint", written, text)
            if starting is not None:
                figures.keep("first_start_s", starting.result(), f"first start       {starting.result():8.2f} s")
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        figures.keep("bytes", num_bytes, f"{num_bytes / 1e9:.2f} GB on disk, {device}")
        if "disk" in args.parts:
            measure_memory(folder, config, device, args, figures)
        if "starts" in args.parts:
            if device == "cuda":
                torch.cuda.empty_cache()  # engines will use this GPU
            measure_starts(folder, device, args, Path(scratch), figures)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
