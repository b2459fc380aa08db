"""Publishes of an adapter into a live vLLM engine under load, and what they cost the requests.

    python bench/adapter_sync.py                                      Qwen3-30B-A3B's shape, GPU 0 -> GPU 1
    python bench/adapter_sync.py --experts 0 --layers 2 --hidden 64 --heads 4 --head-dim 32 --width 64 --vocab 512 \\
        --requests 8 --seconds 3 --device cpu                        a CPU will do: no experts

One trainer rank with random weights and LoRA on attention and all experts (on a CPU: attention and feed-forward), one
rollout worker in adapter mode. In one engine, one phase after the other, each with the same number of requests, whose
lengths come from the same distribution and whose prompts are drawn anew so that none is prefilled from a cache:

    quiet         one version, nothing happens
    flipping      one flip a second to a slot that holds an older version; nothing is sent
    publishing    one publish a second, A and B drawn before each
    flipping again, quiet again: how much equal phases differ
    no adapter    requests that name no adapter

A batch with several versions costs vLLM more than one with a single version, however they came. "flipping" has that mix
and no publish: publishing against it is what publishes cost, publishing against quiet is the two together. Both are
compared with the mean of before and after.

A phase begins when no request reads a version of the phase before. Inter-token latency is the time between two outputs
of one request. "late" is how long the rollout worker's event loop, on which messages of a publish wait too, let a timer
wait; "gc" its process's longest collection. "wire" is Mooncake's own write between the same two processes. CUDA graphs
are on; only the batch sizes that these requests make are captured, which the output lists.

Every publish is printed when it ends, and bench/results/adapter_sync-<device>.json is there after the first phase, with
"is_partial" until the last.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of this folder, where a file hides the package weight_sync

from bench.runs import environment  # noqa: E402
from bench.shapes import add_shape_options, model_config  # noqa: E402
from bench.trainer_side import KEY, draw_adapters, measure_wire, wait  # noqa: E402

STAGES = ("total_s", "begin_s", "mark_s", "prepare_s", "write_s", "verify_s", "commit_s")
SHOWN = (
    "tokens_per_s",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "loop_late_p99_ms",
    "loop_late_max_ms",
    "collection_max_ms",
)
PHASES = ("quiet", "flipping", "publishing", "flipping again", "quiet again", "no adapter")
BOUND_S = 0.060
"""What a publish of an adapter may take from one GPU to another."""
WATCH_S = 0.005
"""How often the worker's event loop is asked whether it is late."""
FIRST_FLIP = 1_000_000
"""Versions of flips: no publish has them, so no prefix block is shared."""
SETTLE_S = 0.02
"""How often it is asked which versions requests read."""


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """config.json: a mixture of experts, or a dense model with --experts 0."""
    config = model_config(args)
    if not args.experts:
        dropped = {"moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob",
                   "decoder_sparse_step", "mlp_only_layers"}  # fmt: skip
        config = {key: value for key, value in config.items() if key not in dropped}
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return config


def slots_of(config: dict[str, Any], args: argparse.Namespace) -> Any:
    """What the engine is told about adapters."""
    from conf.schema import LoraConfig
    from rollout.types import AdapterSlotsSpec
    from trainer.adapter_names import adapter_tensors, target_modules
    from trainer.model.spec import ModelSpec

    tensors = ModelSpec.from_hf_config(config).checkpoint_tensors("bfloat16")
    lora = LoraConfig(rank=args.rank, alpha=2.0 * args.rank)
    return AdapterSlotsSpec(
        args.slots, lora.slot_rank, tuple(target_modules(tensors, lora)), tuple(adapter_tensors(tensors, lora))
    )


def capture_sizes(num_requests: int) -> list[int]:
    """Batch sizes with a CUDA graph, in tokens: every 8th about the number of requests, which is what decodes, every
    32nd up to twice as many, with prefills among them; few below, which are met as requests begin. As in vLLM's own
    list, larger batches have none."""
    few = [1, *(num_requests * quarter // 4 for quarter in (1, 2, 3))]
    decodes = range(num_requests * 7 // 8, num_requests, 8)
    return sorted({*few, *decodes, *range(num_requests, 2 * num_requests + 1, 32)} - {0})


# ---- the engine's process ----


class Load:
    """Requests at work, and when each of their tokens came."""

    def __init__(self, worker: Any, args: argparse.Namespace) -> None:
        self._worker = worker
        self._args = args
        self._tasks: list[asyncio.Task[None]] = []
        self._last: dict[str, float] = {}
        self._gaps: list[float] = []
        self._versions: set[int] = set()
        self._num_before, self._began = 0, 0.0
        self._flipping: asyncio.Task[None] | None = None
        self._late, self._collected, self._collection_began = [0.0], [0.0], 0.0
        self._flips = itertools.count(FIRST_FLIP)
        client = worker._engine._llm.engine_core
        inner = client.get_output_async

        async def timed() -> Any:
            outputs = await inner()
            now = time.monotonic()
            for output in outputs.outputs:
                if output.new_token_ids:
                    last = self._last.get(output.request_id)
                    if last is not None:
                        self._gaps.append(now - last)
                    self._last[output.request_id] = now
                if output.finish_reason is not None:
                    self._last.pop(output.request_id, None)
            return outputs

        client.get_output_async = timed
        self._watching = asyncio.create_task(self._watch())
        gc.callbacks.append(self._note_collection)

    async def start(self, has_adapter: bool) -> None:
        """Requests of random lengths, each followed by another one; returns when all are at work."""
        await self.stop()
        before = self._worker.health().num_generated_tokens
        self._tasks = [asyncio.create_task(self._keep_sampling(i, has_adapter)) for i in range(self._args.requests)]
        while self._worker.health().num_generated_tokens - before < 2 * self._args.requests * self._args.max_tokens:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks, self._last = [], {}

    async def close(self) -> None:
        """End the requests and the watch."""
        await self.stop()
        self._watching.cancel()
        gc.callbacks.remove(self._note_collection)

    async def settle(self) -> None:
        """Return when what began under other versions has ended: older ones, or with flips all of this moment."""
        table = self._worker._replica._table
        others = set(table.num_readers)
        if self._flipping is None:
            others.discard(table.newest.version)
        while others & set(table.num_readers):
            await asyncio.sleep(SETTLE_S)

    def begin(self, flip_every_s: float | None) -> None:
        """A phase; with flips."""
        if flip_every_s is not None:
            self._flipping = asyncio.create_task(self._flip(flip_every_s))
        self._gaps, self._versions, self._late, self._collected = [], set(), [0.0], [0.0]
        self._num_before, self._began = self._worker.health().num_generated_tokens, time.monotonic()

    def end(self) -> dict[str, Any]:
        """What came in the phase."""
        if self._flipping is not None:
            self._flipping.cancel()
            self._flipping = None
        seconds = time.monotonic() - self._began
        num_tokens = self._worker.health().num_generated_tokens - self._num_before
        gaps, late = sorted(self._gaps), sorted(self._late)
        at = {f"itl_p{p}_ms": 1000 * gaps[min(len(gaps) - 1, len(gaps) * p // 100)] for p in (50, 99)} if gaps else {}
        failed = [str(task.exception()) for task in self._tasks if task.done() and not task.cancelled()]
        return {
            "seconds": seconds,
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / seconds,
            **at,
            "itl_max_ms": 1000 * gaps[-1] if gaps else None,
            "loop_late_p99_ms": 1000 * late[len(late) * 99 // 100],
            "loop_late_max_ms": 1000 * late[-1],
            "collection_max_ms": 1000 * max(self._collected),
            "versions": sorted(self._versions),
            "failed": failed,
        }

    async def _watch(self) -> None:
        """How late the worker's event loop is, which a publish meets at every message."""
        while True:
            due = time.monotonic() + WATCH_S
            await asyncio.sleep(WATCH_S)
            self._late.append(time.monotonic() - due)

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.monotonic()
        else:
            self._collected.append(time.monotonic() - self._collection_began)

    async def _flip(self, every_s: float) -> None:
        """What a publish does to requests, without its bytes."""
        table = self._worker._replica._table
        while True:
            await asyncio.sleep(every_s)
            slot = table.free()
            if slot is not None:
                table.write(slot)
                table.commit(slot, next(self._flips))

    async def _keep_sampling(self, index: int, has_adapter: bool) -> None:
        from conf.schema import SamplingConfig
        from rollout.types import Prompt

        draw = random.Random(index)
        most = self._args.max_tokens
        while True:
            tokens = tuple(draw.randrange(1, self._args.vocab) for _ in range(self._args.prompt_tokens))
            sampling = SamplingConfig(max_tokens=draw.randint(most // 2, most), stop_at_eos=False)
            if has_adapter:
                (rollout,) = await self._worker.generate_group(Prompt(index, tokens, ""), 1, sampling=sampling)
                self._versions |= set(rollout.policy_versions)
            else:
                await self._worker._engine.generate_group(tokens, 1, sampling)


def run_engine(config: dict[str, Any], device: str, args: argparse.Namespace, pipe: Connection) -> None:
    """One rollout worker until told to end."""
    asyncio.run(serve(config, device, args, pipe))


async def serve(config: dict[str, Any], device: str, args: argparse.Namespace, pipe: Connection) -> None:
    """Obeys: ("start", has_adapter), ("begin", seconds from flip to flip or None), ("settle",), ("end",), ("stop",)."""
    from conf.schema import BusySlot, Device, DType, RolloutConfig, SamplingConfig, SyncMode, WeightSyncConfig
    from rollout.engine import engine_environment
    from rollout.worker import RolloutWorker
    from trainer.model.spec import ModelSpec

    os.environ.update(engine_environment(Device(device)))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        worker = RolloutWorker(
            Path(folder),
            config=RolloutConfig(max_model_len=2048, sampling=SamplingConfig(max_tokens=1024, stop_at_eos=False)),
            weight_sync=WeightSyncConfig(mode=SyncMode.adapter, on_busy_slot=BusySlot(args.on_busy_slot)),
            dtype=DType.bfloat16,
            device=device,
            seed=0,
            tensors=ModelSpec.from_hf_config(config).checkpoint_tensors("bfloat16"),
            key=KEY,
            adapters=slots_of(config, args),
        )
        if device == "cuda":
            worker._engine._arguments["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(args.requests)}
        began = time.monotonic()
        address = await worker.start()
        compilation = worker._engine._llm.vllm_config.compilation_config  # pyright: ignore[reportOptionalMemberAccess]
        started = {
            "engine_start_s": time.monotonic() - began,
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "cudagraph_capture_sizes": compilation.cudagraph_capture_sizes,
        }
        pipe.send((address, await worker.adapter_endpoint(), started))
        load = Load(worker, args)
        while (call := await asyncio.to_thread(pipe.recv))[0] != "stop":
            if call[0] == "start":
                await load.start(call[1])
                pipe.send(None)
            elif call[0] == "begin":
                load.begin(call[1])
                pipe.send(None)
            elif call[0] == "settle":
                await load.settle()
                pipe.send(None)
            else:
                pipe.send(load.end())
        await load.close()
        await worker.stop()
        pipe.send(None)


# ---- the trainer's side ----


class Trainer:
    """One rank: a decoder with random weights, a publisher of its base and one of its adapter."""

    def __init__(self, config: dict[str, Any], device: str, args: argparse.Namespace) -> None:
        import torch

        from conf.schema import LoraConfig, TrainerConfig
        from trainer.model.decoder import build_decoder
        from trainer.model.spec import ModelSpec
        from weight_sync.transport.mooncake import MooncakeTransport

        self.device = device
        self.lora = LoraConfig(rank=args.rank, alpha=2.0 * args.rank)
        spec = ModelSpec.from_hf_config(config)
        self.decoder = build_decoder(spec, dtype=torch.bfloat16, device=device, trainer=TrainerConfig(lora=self.lora))
        with torch.no_grad():
            for parameter in self.decoder.parameters():
                parameter.normal_(0.0, 0.02)
        self.adapters = [p for name, p in self.decoder.named_parameters() if "lora_" in name]
        self.transport = MooncakeTransport(device=device)
        self.publisher: Any = None

    def connect(self, base: str, slots: str) -> dict[str, Any]:
        """Send the base once, then plan the adapter's publishes."""
        from trainer.adapter_source import AdapterSource
        from trainer.weight_source import TrainerWeightSource

        began = time.perf_counter()
        publisher = self._publisher(TrainerWeightSource(self.decoder, 0, is_merged=False))
        publisher.connect([base])
        report = publisher.publish(0)
        publisher.close()
        if report.num_committed != 1:
            raise RuntimeError(report.replicas[0].error)
        base_s = time.perf_counter() - began
        began = time.perf_counter()
        self.publisher = self._publisher(AdapterSource(self.decoder, 0, self.lora))
        summary = self.publisher.connect([slots])
        return {
            "base_bytes": report.num_bytes,
            "base_connect_and_publish_s": base_s,
            "connect_s": time.perf_counter() - began,
            "num_tasks": summary.num_tasks,
            "bytes": summary.num_bytes,
        }

    def _publisher(self, source: Any) -> Any:
        from conf.schema import WeightSyncConfig
        from weight_sync.publisher import Publisher

        return Publisher(
            source, self.transport, rank=0, world_size=1, group=None, config=WeightSyncConfig(), key=KEY,
            device=self.device,
        )  # fmt: skip

    def publish(self, version: int) -> dict[str, Any]:
        """Another adapter, into a free slot."""
        draw_adapters(self.adapters)
        wait(self.device)
        report = self.publisher.publish(version)
        if report.num_committed != 1:
            raise RuntimeError(report.replicas[0].error)
        return asdict(report)


def line(stages: dict[str, Any]) -> str:
    """The stages of a publish in milliseconds."""
    return " ".join(f"{name.removesuffix('_s')} {1000 * stages[name]:.1f}" for name in STAGES)


def measure(
    trainer: Trainer, pipe: Connection, args: argparse.Namespace, keep: Callable[[dict[str, Any], list[Any]], None]
) -> None:
    """All phases; after each, `keep` gets what is known."""

    def ask(*call: Any, timeout_s: float = 300.0) -> Any:
        pipe.send(call)
        if not pipe.poll(timeout_s):
            raise RuntimeError(f"the engine's process did not answer {call} within {timeout_s:g} s")
        return pipe.recv()

    phases: dict[str, Any] = {}
    reports: list[Any] = []
    version = 0
    for _ in range(args.warm_up):  # the first one probes the engine
        print(f"warm-up publish {version}, ms: {line(trainer.publish(version))}", flush=True)
        version += 1
    for phase in PHASES:
        if phase in ("quiet", "no adapter"):
            ask("start", phase != "no adapter")
        if phase.startswith("flipping"):
            ask("begin", args.every_s)
        if "flipping" in phase or phase == "quiet again":
            ask("settle")
        ask("begin", None)
        began = time.monotonic()
        seconds = args.seconds if phase == "publishing" else args.beside_s
        while (left := began + seconds - time.monotonic()) > 0:
            if phase != "publishing":
                time.sleep(left)
                continue
            due = time.monotonic() + args.every_s
            reports.append(trainer.publish(version))
            print(f"publish {version}, ms: {line(reports[-1])}", flush=True)
            version += 1
            time.sleep(max(0.0, min(due - time.monotonic(), began + seconds - time.monotonic())))
        phases[phase] = ask("end")
        print(phase, json.dumps({k: v for k, v in phases[phase].items() if k != "versions"}), flush=True)
        keep(phases, reports)


def show(report: dict[str, Any]) -> None:
    """The tables, and the ratios that matter."""
    wire = report["wire"]
    print(f"\n{report['bytes'] / 1e9:.3f} GB an adapter; wire ({wire['link']}) {wire['gb_per_s']:.1f} GB/s")
    print(" ".join(f"{column:>12}" for column in ("ms", *STAGES)))
    for name, pick in (("median", statistics.median), ("max", max)):
        print(
            " ".join(
                f"{c:>12}" for c in (name, *(f"{1000 * pick(r[s] for r in report['reports']):.1f}" for s in STAGES))
            )
        )
    late = [r["total_s"] for r in report["reports"] if r["total_s"] > BOUND_S]
    print(f"{len(late)} of {len(report['reports'])} publishes took more than {1000 * BOUND_S:.0f} ms")
    print(
        "\n"
        + " ".join(
            f"{column:>14}"
            for column in ("phase", "tokens/s", "p50 ms", "p99 ms", "max ms", "late p99", "late max", "gc max")
        )
    )
    for name, phase in report["phases"].items():
        cells = [phase[key] for key in SHOWN]
        print(" ".join(f"{cell:>14}" for cell in (name, *(f"{cell:.1f}" for cell in cells))))
    for name, value in report["ratios"].items():
        print(f"{name}: {value:.3f}")


def ratios(phases: dict[str, Any]) -> dict[str, float]:
    """Publishing against flipping and quiet phases, before and after; and how much equal phases differ."""

    def mean(phase: str, key: str) -> float:
        return statistics.mean(phases[name][key] for name in (phase, f"{phase} again"))

    found = {}
    for phase in ("flipping", "quiet"):
        for what, key in (("tokens/s", "tokens_per_s"), ("p99 inter-token latency", "itl_p99_ms")):
            found[f"{what}, publishing / {phase}"] = phases["publishing"][key] / mean(phase, key)
            found[f"{what}, {phase} again / {phase}"] = phases[f"{phase} again"][key] / phases[phase][key]
    found["tokens/s, quiet / no adapter"] = mean("quiet", "tokens_per_s") / phases["no adapter"]["tokens_per_s"]
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    add_shape_options(parser, rank=32)
    parser.add_argument("--slots", type=int, default=6, help="of the engine; requests hold theirs to their end")
    parser.add_argument("--on-busy-slot", default="wait", choices=("wait", "requeue", "re_prefill"))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="of a response; lengths lie between half and all of it"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of publishing")
    parser.add_argument("--beside-s", type=float, default=15.0, help="of every other phase")
    parser.add_argument("--every-s", type=float, default=1.0, help="from one publish to the next")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="where the JSON goes; default bench/results/adapter_sync-<device>.json"
    )
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse()
    facts = environment(args.commit)
    device = args.device or ("cuda" if facts["gpus"] else "cpu")
    config = config_of(args)
    print(json.dumps(facts, indent=2), flush=True)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=run_engine, args=(config, device, args, theirs))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[-1]
    process.start()
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    theirs.close()
    try:
        trainer = Trainer(config, device, args)
        while not pipe.poll(5):
            if not process.is_alive():
                raise RuntimeError(f"the engine's process ended with code {process.exitcode}")
        base, slots, started = pipe.recv()
        print("engine up: " + json.dumps(started), flush=True)
        wire = measure_wire(
            trainer.transport, base, 10, device=trainer.device
        )  # into the largest parameter, whose values come after
        connected = trainer.connect(base, slots)
        print(json.dumps(connected), flush=True)
        report: dict[str, Any] = {
            "environment": facts, "model": config, "arguments": {k: str(v) for k, v in vars(args).items()},
            **started, **connected, "wire": wire,
        }  # fmt: skip
        out: Path = args.out or ROOT / "bench" / "results" / f"adapter_sync-{'gpu' if device == 'cuda' else 'cpu'}.json"
        out.parent.mkdir(parents=True, exist_ok=True)

        def keep(phases: dict[str, Any], reports: list[Any]) -> None:  # what comes after may fail
            is_partial = len(phases) < len(PHASES)
            report.update(is_partial=is_partial, phases=phases, reports=reports)
            if not is_partial:
                report["ratios"] = ratios(phases)
            out.write_text(json.dumps(report, indent=2) + "\n")

        measure(trainer, pipe, args, keep)
        show(report)
        print(f"written: {out}", flush=True)
        pipe.send(("stop",))
        pipe.poll(60)
        process.join(60)
    finally:
        process.kill()


if __name__ == "__main__":
    main()
