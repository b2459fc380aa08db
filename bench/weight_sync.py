"""A publish of merged weights from one trainer rank into one engine, stage by stage, beside the bare wire.

    python bench/weight_sync.py                                       Qwen3-30B-A3B's shape, GPU 0 -> GPU 1
    python bench/weight_sync.py --engine vllm --requests 256 --settle-s 1     into a live vLLM engine under load
    python bench/weight_sync.py --layers 2 --experts 8 --hidden 256 --width 128 --vocab 1000      a CPU will do

The source is the trainer's own decoder with random weights and LoRA on attention and all experts; A and B are drawn
anew before every publish. `--engine plain` is a process with vLLM's parameter layout and nothing else; `vllm` is a
rollout worker. Figures are medians over the publishes after the warm-up. "wire" is Mooncake's transfer_sync_write
between the same two processes, in the same run, into the engine's largest parameter. "parts" are what packing and
hashing cost alone, without a write beside them. Writes bench/results/weight_sync-<device>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of this folder, where this file hides the package weight_sync

from bench.runs import environment  # noqa: E402

KEY = b"slipstream-bench-weight-sync-key"
MIB = 1 << 20
STAGES = ("pause_s", "begin_s", "prepare_s", "write_s", "verify_s", "commit_s", "total_s")
FUSIONS = (
    (r"(.*)\.[qkv]_proj\.weight", r"\1.qkv_proj.weight"),
    (r"(.*\.experts)\.\d+\.(?:gate|up)_proj\.weight", r"\1.w13_weight"),
    (r"(.*\.experts)\.\d+\.down_proj\.weight", r"\1.w2_weight"),
    (r"(.*\.mlp)\.(?:gate|up)_proj\.weight", r"\1.gate_up_proj.weight"),
)
"""Checkpoint tensors that vLLM lays one below the other in one parameter."""


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """config.json of a Qwen3-MoE; the defaults are Qwen3-30B-A3B's."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": max(1, args.heads // 8),
        "head_dim": args.head_dim,
        "intermediate_size": 3 * args.hidden,
        "moe_intermediate_size": args.width,
        "num_experts": args.experts,
        "num_experts_per_tok": min(8, args.experts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


# ---- the engine's process ----


def run_engine(kind: str, config: dict[str, Any], device: str, num_requests: int, pipe: Connection) -> None:
    """Serve one replica until told to end."""
    plain = kind == "plain"
    asyncio.run(serve_plain(config, device, pipe) if plain else serve_vllm(config, device, num_requests, pipe))


async def serve_plain(config: dict[str, Any], device: str, pipe: Connection) -> None:
    """Parameters in vLLM's layout behind an endpoint."""
    import torch

    from weight_sync.endpoint import ReplicaEndpoint
    from weight_sync.receiver import Receiver
    from weight_sync.transport.mooncake import MooncakeTransport

    layout = plain_layout(config)
    params = {p.name: torch.zeros(p.shape, dtype=torch.bfloat16, device=device) for p in layout.params}
    synchronize = torch.cuda.synchronize if device == "cuda" else None
    receiver = Receiver(params, layout, MooncakeTransport(device=device), synchronize=synchronize)
    endpoint = ReplicaEndpoint(PlainReplica(receiver), KEY)
    pipe.send(await endpoint.start())
    await asyncio.to_thread(pipe.recv)
    pipe.send(0)
    await endpoint.close()


class PlainReplica:
    """ReplicaHandler over one Receiver; there is no engine to pause."""

    def __init__(self, receiver: Any) -> None:
        self._receiver = receiver

    async def describe(self) -> list[Any]:
        """See ReplicaHandler."""
        return [self._receiver.describe()]

    async def begin(self, version: int, epoch: int, digest: str) -> list[Any]:
        """See ReplicaHandler."""
        return [self._receiver.begin(version, epoch, digest)]

    async def verify(self, version: int, epoch: int, digest: str, expected: Any) -> None:
        """See ReplicaHandler."""
        self._receiver.verify(version, epoch, digest, expected[0])

    async def commit(self, version: int, epoch: int) -> None:
        """See ReplicaHandler."""
        self._receiver.commit(version, epoch)

    async def abort(self, epoch: int, reason: str) -> None:
        """See ReplicaHandler."""
        self._receiver.abort(epoch, reason)


def plain_layout(config: dict[str, Any]) -> Any:
    """What vLLM's loader does at tp_size=1: fused projections, stacked experts, all else as in the checkpoint."""
    from trainer.model.spec import ModelSpec
    from weight_sync.layout import DestLayout, Load, Param, Region

    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    loads = []
    for meta in ModelSpec.from_hf_config(config).checkpoint_tensors("bfloat16"):
        name = meta.name
        for pattern, fused in FUSIONS:
            name = re.sub(f"^{pattern}$", fused, name)
        first, row = rows.get(name, 0), meta.shape[1] if len(meta.shape) == 2 else 1
        stride = (row, 1) if len(meta.shape) == 2 else (1,)
        region = Region((0,) * len(meta.shape), meta.shape)
        loads.append(Load(meta.name, region, tuple(range(len(meta.shape))), name, first * row, stride))
        rows[name] = first + meta.shape[0]
        shapes[name] = (rows[name], *meta.shape[1:])
    return DestLayout(0, tuple(Param(name, shape, "bfloat16") for name, shape in shapes.items()), tuple(loads))


async def serve_vllm(config: dict[str, Any], device: str, num_requests: int, pipe: Connection) -> None:
    """A rollout worker with CUDA graphs, from the first version on with so many requests at work."""
    from conf.schema import DType, RolloutConfig, SamplingConfig, WeightSyncConfig
    from rollout.engine import engine_environment
    from rollout.worker import Device, RolloutWorker
    from trainer.model.spec import ModelSpec

    os.environ.update(engine_environment(Device(device)))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        worker = RolloutWorker(
            Path(folder),
            config=RolloutConfig(max_model_len=2048, sampling=SamplingConfig(max_tokens=1024, stop_at_eos=False)),
            weight_sync=WeightSyncConfig(),
            dtype=DType.bfloat16,
            device=device,
            seed=0,
            tensors=ModelSpec.from_hf_config(config).checkpoint_tensors("bfloat16"),
            key=KEY,
        )
        pipe.send(await worker.start())
        requests = [asyncio.create_task(keep_sampling(worker, index)) for index in range(num_requests)]
        await asyncio.to_thread(pipe.recv)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        pipe.send(worker.health().num_generated_tokens)
        await worker.stop()


async def keep_sampling(worker: Any, index: int) -> None:
    """One response after the other, whenever the worker serves."""
    from rollout.errors import ReplicaNotServing
    from rollout.types import Prompt

    prompt = Prompt(index, tuple((index * 7 + i) % 900 + 1 for i in range(128)), "")
    while True:
        try:
            await worker.generate_group(prompt, 1)
        except ReplicaNotServing:
            await asyncio.sleep(0.01)


# ---- the trainer's side ----


def build_source(config: dict[str, Any], device: str, rank: int) -> tuple[Any, Any]:
    """(decoder, weight source) with random values, drawn where they stay."""
    import torch

    from conf.schema import LoraConfig, TrainerConfig
    from trainer.model.decoder import build_decoder
    from trainer.model.spec import ModelSpec
    from trainer.weight_source import TrainerWeightSource

    decoder = build_decoder(
        ModelSpec.from_hf_config(config),
        dtype=torch.bfloat16,
        device=device,
        trainer=TrainerConfig(lora=LoraConfig(rank=rank, alpha=2.0 * rank)),
    )
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.02)
    return decoder, TrainerWeightSource(decoder, rank=0)


def draw_adapters(decoder: Any) -> None:
    """Another policy: every A and B anew."""
    import torch

    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.02)


def measure_wire(transport: Any, endpoint: str, repeats: int) -> dict[str, Any]:
    """GB/s of Mooncake's own synchronous write, into the engine's largest parameter, for a few sizes."""
    import torch

    from weight_sync.endpoint import ReplicaClients
    from weight_sync.protocol import Describe, Described

    clients = ReplicaClients([endpoint], KEY)
    reply = clients.call(Describe, {0: {}}, {0: 60.0})[0]
    clients.close()
    if not isinstance(reply, Described):
        raise reply if isinstance(reply, Exception) else RuntimeError(f"{endpoint} answered {reply}")
    item = reply.ranks[0]
    largest = max(item.layout.params, key=lambda param: param.num_bytes)
    device = "cpu" if transport.link == "tcp" else "cuda"
    source = torch.zeros(largest.num_bytes, dtype=torch.uint8, device=device)
    transport.register([source])
    figures: dict[str, Any] = {}
    for size in sorted({min(size, largest.num_bytes) for size in (16 * MIB, 256 * MIB, 1024 * MIB)}):
        seconds = []
        for _ in range(repeats + 2):
            began = time.perf_counter()
            code = transport._engine.transfer_sync_write(
                item.binding.session, source.data_ptr(), item.binding.addresses[largest.name], size
            )
            seconds.append(time.perf_counter() - began)
            if code != 0:
                raise RuntimeError(f"the bare write failed with code {code}")
        figures[str(size)] = size / statistics.median(seconds[2:]) / 1e9
    return {"link": transport.link, "gb_per_s_by_bytes": figures, "gb_per_s": max(figures.values())}


def measure_publishes(
    decoder: Any, source: Any, transport: Any, endpoint: str, device: str, watermark_bytes: int, args: Any
) -> dict[str, Any]:
    """Connect under one watermark, warm up, publish."""
    from conf.schema import WeightSyncConfig
    from weight_sync.publisher import Publisher

    sync = WeightSyncConfig(watermark_bytes=watermark_bytes, verify_hashes=not args.no_hashes)
    publisher = Publisher(source, transport, rank=0, world_size=1, group=None, config=sync, key=KEY, device=device)
    began = time.perf_counter()
    summary = publisher.connect([endpoint])
    connect_s = time.perf_counter() - began
    pipeline_s = time_calls(publisher._pipeline, "run")
    reports = []
    for version in range(args.warm_up + args.publishes):
        draw_adapters(decoder)
        wait(device)
        time.sleep(args.settle_s)
        report = publisher.publish(version)
        if report.num_committed != 1:
            raise RuntimeError(report.replicas[0].error)
        print(" ".join(f"{stage}={getattr(report, stage):.4f}" for stage in STAGES), flush=True)
        reports.append(asdict(report))
    measured = reports[args.warm_up :]
    figures: dict[str, Any] = {stage: statistics.median(r[stage] for r in measured) for stage in STAGES}
    num_bytes = measured[0]["num_bytes"]
    parts = measure_parts(publisher, device)
    publisher.close()
    return {
        "watermark_bytes": watermark_bytes,
        "peak_bytes": measured[0]["peak_bytes"],
        "num_tasks": summary.num_tasks,
        "num_loads": parts.pop("num_loads"),
        "connect_s": connect_s,
        "num_bytes": num_bytes,
        **figures,
        "pipeline_s": statistics.median(pipeline_s[args.warm_up :]),
        "total_s_min": min(r["total_s"] for r in measured),
        "total_s_max": max(r["total_s"] for r in measured),
        "write_gb_per_s": num_bytes / figures["write_s"] / 1e9,
        "total_gb_per_s": num_bytes / figures["total_s"] / 1e9,
        "parts": parts,
        "reports": reports,
    }


def time_calls(owner: Any, method: str) -> list[float]:
    """Seconds of every later call of a method, as they are made."""
    inner, seconds = getattr(owner, method), []

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*args)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, method, timed)
    return seconds


def measure_parts(publisher: Any, device: str) -> dict[str, Any]:
    """What packing and hashing take with nothing beside them: the host's time, and until the device is done."""
    import torch

    pipeline = publisher._pipeline
    slot, sums = pipeline._slot(0), pipeline._sums[0]

    def pack() -> None:
        with torch.no_grad():
            for load in pipeline._loads:
                load.fill(slot)

    def hash_all() -> None:
        for load in pipeline._loads:
            for hashes in load.hashes[:1]:
                hashes.add_to(sums[: len(load.packets)])

    figures: dict[str, Any] = {"num_loads": len(pipeline._loads)}
    pipeline._source.begin(0)
    try:
        for name, work in (("pack", pack), ("hash", hash_all)):
            for _ in range(2):
                wait(device)
                began = time.perf_counter()
                work()
                figures[f"{name}_host_s"] = time.perf_counter() - began
                wait(device)
                figures[f"{name}_s"] = time.perf_counter() - began
    finally:
        pipeline._source.end()
    return figures


def wait(device: str) -> None:
    """Until the device is idle."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def show(report: dict[str, Any]) -> None:
    """The table."""
    wire = report["wire"]["gb_per_s"]
    print(f"\n{report['bytes'] / 1e9:.2f} GB; wire ({report['wire']['link']}) {wire:.1f} GB/s")
    columns = ("watermark MiB", *STAGES, "pipeline_s", "write GB/s", "of wire", "pack_s", "hash_s")
    print(" ".join(f"{column:>13}" for column in columns))
    for row in report["results"]:
        cells = [f"{row['watermark_bytes'] / MIB:.0f}", *(f"{row[stage]:.4f}" for stage in (*STAGES, "pipeline_s"))]
        cells += [f"{row['write_gb_per_s']:.1f}", f"{row['write_gb_per_s'] / wire:.0%}"]
        cells += [f"{row['parts']['pack_s']:.4f}", f"{row['parts']['hash_s']:.4f}"]
        print(" ".join(f"{cell:>13}" for cell in cells))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("plain", "vllm"), default="plain")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    for name, value in (("layers", 48), ("experts", 128), ("hidden", 2048), ("width", 768), ("vocab", 151936)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--publishes", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--watermark-mib", type=int, nargs="+", default=[1024])
    parser.add_argument("--requests", type=int, default=0, help="requests at work in the vLLM engine meanwhile")
    parser.add_argument("--settle-s", type=float, default=0.0, help="wait before every publish, for requests to run")
    parser.add_argument("--no-hashes", action="store_true")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default bench/results/weight_sync-<device>.json")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    return parser.parse_args()


def start_engine(args: argparse.Namespace, config: dict[str, Any], device: str) -> tuple[Any, Connection]:
    """The engine's process sees GPU 1 alone, this one from now on GPU 0 alone."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=run_engine, args=(args.engine, config, device, args.requests, theirs))
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    process.start()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    theirs.close()
    return process, pipe


def main() -> None:
    """Measure and print."""
    args = parse()
    facts = environment(args.commit)
    device = args.device or ("cuda" if facts["gpus"] else "cpu")
    config = model_config(args)
    report: dict[str, Any] = {
        "environment": facts,
        "model": config,
        "lora_rank": args.rank,
        "engine": args.engine,
        "num_requests": args.requests,
    }
    print(json.dumps(facts, indent=2), flush=True)
    process, pipe = start_engine(args, config, device)
    try:
        from weight_sync.transport.mooncake import MooncakeTransport

        decoder, source = build_source(config, device, args.rank)
        while not pipe.poll(5):
            if not process.is_alive():
                raise RuntimeError(f"the engine's process ended with code {process.exitcode}")
        endpoint = pipe.recv()
        transport = MooncakeTransport(device=device)
        report["wire"] = measure_wire(transport, endpoint, args.publishes)
        report["results"] = [
            measure_publishes(decoder, source, transport, endpoint, device, mib * MIB, args)
            for mib in args.watermark_mib
        ]
        report["bytes"] = report["results"][0]["num_bytes"]
        pipe.send("end")
        report["num_generated_tokens"] = pipe.recv() if pipe.poll(60) else None
        process.join(60)
    finally:
        process.kill()
    show(report)
    out: Path = args.out or ROOT / "bench" / "results" / f"weight_sync-{'gpu' if device == 'cuda' else 'cpu'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
