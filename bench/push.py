"""From safetensors on disk to engines that serve: `slipstream push` beside a plain vLLM load, and its parts alone.

    python bench/push.py --layers 24                     half of Qwen3-30B-A3B's layers: 31 GB, one GPU, 64 GB of disk
    python bench/push.py                                 all 48: 61 GB
    python bench/push.py --layers 2 --experts 4 --hidden 64 --heads 4 --width 32 --head-dim 16 --vocab 500       a CPU

In one run, on one checkpoint of random bfloat16 weights (written once into --folder):

    h2d        page-locked host memory to the device, 1 GiB at a time: the bound of the offloaded publish
    disk       this product's own read alone, per number of threads, and safetensors' reader; page cache dropped
    publish    from page-locked host memory into a process with vLLM's parameter layout, hashes on, median
    dummy      `vllm serve` with dummy weights, until it answers
    plain      `vllm serve` that loads the checkpoint, until it answers; page cache dropped
    push       `slipstream push --start 1`, until the engine serves the checkpoint; page cache dropped

The first start fills vLLM's compile caches and is not counted. The cache is dropped with posix_fadvise(DONTNEED), and
what stays resident is measured (mincore) and reported: where a file system keeps pages, "disk" is not the disk's.
Writes bench/results/push-<device>.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of this folder, where files hide the packages trainer and weight_sync

from bench.engine_side import KEY, EngineSpec, run_engine  # noqa: E402
from bench.runs import environment  # noqa: E402
from bench.shapes import add_shape_options, model_config  # noqa: E402

MIB = 1 << 20

START_TIMEOUT_S = 900.0
LAYERS_A_FILE = 4


def write_checkpoint(folder: Path, config: dict[str, Any], device: str) -> None:
    """Random weights in files of a few layers, unless this very checkpoint is there."""
    import torch
    from safetensors.torch import save_file

    from trainer.model.spec import ModelSpec
    from weight_sync.safetensors_files import INDEX_NAME

    text = json.dumps(config)
    if (folder / INDEX_NAME).is_file() and (folder / "config.json").read_text() == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[int, list[Any]] = {}
    for meta in ModelSpec.from_hf_config(config).checkpoint_tensors("bfloat16"):
        layer = int(meta.name.split(".")[2]) if ".layers." in meta.name else -1
        groups.setdefault(layer // LAYERS_A_FILE, []).append(meta)
    weight_map: dict[str, str] = {}
    for number, metas in enumerate(groups.values()):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            meta.name: (torch.randn(meta.shape, dtype=torch.bfloat16, device=device) * 0.02).cpu() for meta in metas
        }
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(text)


def drop_cache(folder: Path) -> float:
    """Ask the kernel to forget the files. Returns the part of their bytes that is still in memory."""
    resident = total = 0
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(file).st_size
        pages = mmap.mmap(file, size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(pages)
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), flags)
        resident += sum(flag & 1 for flag in bytes(flags)) * mmap.PAGESIZE
        total += size
        del anchor
        pages.close()
        os.close(file)
    return min(1.0, resident / total)


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


def measure_disk(folder: Path, threads: list[int]) -> tuple[dict[str, Any], Any]:
    """Seconds of a cold read, by reader; and the last checkpoint read, for the publish."""
    from safetensors import safe_open

    from weight_sync.checkpoint import Checkpoint

    figures: dict[str, Any] = {}
    resident = drop_cache(folder)
    began, num_bytes = time.perf_counter(), 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                num_bytes += file.get_tensor(name).clone().nbytes  # mapped: the clone reads it
    figures["safetensors"] = _read_figures(num_bytes, time.perf_counter() - began, resident)
    checkpoint: Any = None
    for count in threads:
        checkpoint = None  # its memory goes before the next one's comes
        resident = drop_cache(folder)
        checkpoint = Checkpoint(folder, num_threads=count)
        report = checkpoint.read()
        figures[f"pread, {count} threads"] = _read_figures(report.num_bytes, report.seconds, resident) | {
            "pinned_bytes": report.pinned_bytes
        }
    again = checkpoint.refresh()
    figures[f"refresh, {threads[-1]} threads, cached"] = _read_figures(again.num_bytes, again.seconds, 1.0)
    return figures, checkpoint


def _read_figures(num_bytes: int, seconds: float, resident: float) -> dict[str, Any]:
    return {"seconds": seconds, "gb_per_s": num_bytes / seconds / 1e9, "resident_before": resident}


def measure_publish(checkpoint: Any, config: dict[str, Any], device: str, args: Any) -> dict[str, Any]:
    """Publishes from host memory into plain memory of another process."""
    from conf.schema import WeightSyncConfig
    from weight_sync.api import Sender

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
    """Seconds until `vllm serve` with these words answers; it is ended then."""
    from conf.schema import Device
    from rollout.fleet import SERVER_MODULE, server_environment
    from rollout.served import ServedEngine

    engine = ServedEngine("http://127.0.0.1:8711")
    command = [sys.executable, "-m", SERVER_MODULE, "--model", str(folder), "--port", "8711"]
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
        for signum in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, signum)
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def measure_push(folder: Path, args: Any, words: list[str], log_dir: Path) -> dict[str, Any]:
    """The command, as a user types it."""
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "push",
        str(folder),
        "--start",
        "1",
        "--port",
        "8712",
        "--once",
    ]
    command += ["--json", "--log-dir", str(log_dir), "--threads", str(args.threads[-1])]
    command += ["--watermark-mib", str(args.watermark_mib), "--", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    began = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"slipstream push ended with {done.returncode}: {done.stderr[-2000:]}")
    report = json.loads(done.stdout.splitlines()[-1])
    return report | {"command_s": time.perf_counter() - began}


def measure_starts(folder: Path, device: str, args: Any, scratch: Path) -> dict[str, Any]:
    """dummy, plain and push."""
    words = ["--max-model-len", str(args.max_model_len), *args.serve]
    if device == "cpu":
        words += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 * MIB)]
    figures: dict[str, Any] = {
        "first_start_s": measure_server(folder, device, ["--load-format", "dummy", *words], scratch / "0")
    }
    figures["dummy_s"] = measure_server(folder, device, ["--load-format", "dummy", *words], scratch / "1")
    figures["plain_resident_before"] = drop_cache(folder)
    figures["plain_s"] = measure_server(folder, device, words, scratch / "2")
    figures["push_resident_before"] = drop_cache(folder)
    figures["push"] = measure_push(folder, args, words, scratch / "push-logs")
    return figures


def show(report: dict[str, Any]) -> None:
    """The table."""
    print(f"\n{report['bytes'] / 1e9:.2f} GB on disk, {report['device']}")
    for name, row in report["disk"].items():
        cached = f"{row['resident_before']:.0%} cached"
        print(f"  read: {name:<32} {row['seconds']:8.2f} s {row['gb_per_s']:8.2f} GB/s  {cached}")
    publish, h2d = report["publish"], report["h2d_gb_per_s"]
    bound = f", {publish['gb_per_s'] / h2d:.0%} of h2d {h2d:.1f}" if h2d else ""
    print(f"  publish ({publish['link']}) {publish['total_s']:29.3f} s {publish['gb_per_s']:8.2f} GB/s{bound}")
    if "starts" not in report:
        return
    starts = report["starts"]
    serving_s = starts["push"]["serving_s"]
    bound_s = max(starts["dummy_s"], report["disk"][report["disk_reader"]]["seconds"])
    print(f"  dummy start            {starts['dummy_s']:8.2f} s")
    print(f"  plain vLLM load        {starts['plain_s']:8.2f} s, {starts['plain_resident_before']:.0%} cached")
    print(f"  slipstream push        {serving_s:8.2f} s, {starts['push_resident_before']:.0%} cached")
    push = starts["push"]
    print(f"    engine up {push['engines_up_s']:.2f} s, disk read {push['disk_done_s']:.2f} s")
    print(f"    attached {push['attached_s']:.2f} s, planned in {push['connect_s']:.2f} s")
    print(f"  max(dummy, disk)       {bound_s:8.2f} s, push {serving_s - bound_s:+.2f} s")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, rank=None)
    for name, value in (("publishes", 5), ("watermark-mib", 1024), ("max-model-len", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, nargs="+", default=[4, 16, 8], help="of reading; push uses the last one")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is written; a temporary one")
    parser.add_argument("--other-gpu", action="store_true", help="publish to a process on GPU 1 instead of GPU 0")
    parser.add_argument("--no-starts", action="store_true", help="no vLLM: disk, h2d and publish alone")
    parser.add_argument(
        "--serve", nargs="*", default=[], help="further words for vllm serve, without dashes: --serve=..."
    )
    parser.add_argument("--commit", help="where the tree has no git")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = model_config(args)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as scratch:
        folder = args.folder or Path(scratch) / "checkpoint"
        began = time.perf_counter()
        write_checkpoint(folder, config, device)
        report: dict[str, Any] = {
            "environment": environment(args.commit),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "config": config,
            "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            "write_checkpoint_s": time.perf_counter() - began,
            "h2d_gb_per_s": measure_h2d(device, 1024 * MIB),
            "disk_reader": f"pread, {args.threads[-1]} threads",
        }
        report["disk"], checkpoint = measure_disk(folder, args.threads)
        report["publish"] = measure_publish(checkpoint, config, device, args)
        del checkpoint
        if device == "cuda":
            torch.cuda.empty_cache()  # the engines come to this GPU
        show(report)
        if not args.no_starts:
            report["starts"] = measure_starts(folder, device, args, Path(scratch))
            show(report)
        out: Path = args.out or ROOT / "bench" / "results" / f"push-{'gpu' if device == 'cuda' else 'cpu'}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"written: {out}")


if __name__ == "__main__":
    main()
