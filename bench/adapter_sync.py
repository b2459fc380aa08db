"""Publishes an adapter into a live vLLM engine under load, and measures what that costs the requests.

    python bench/adapter_sync.py                                      Qwen3-30B-A3B's shape, GPU 0 -> GPU 1
    python bench/adapter_sync.py --experts 0 --layers 2 --hidden 64 --heads 4 --head-dim 32 --width 64 --vocab 512 \\
        --requests 8 --seconds 3 --device cpu                        runs on a CPU: no experts

It runs one trainer rank with random weights and LoRA on attention and all experts (on a CPU: attention and
feed-forward), and one rollout worker in adapter mode. One engine runs these phases one after the other. All have the
same number of requests, with lengths from the same distribution and new prompts, so that none is prefilled from a
cache:

    quiet         one version, nothing happens
    flipping      one flip per second to a slot that holds an older version; nothing is sent
    publishing    one publish per second, A and B drawn before each
    flipping again, quiet again: how much equal phases differ
    no adapter    requests that name no adapter

A batch with several versions costs vLLM more than one with a single version, with or without publishes. "flipping" has
that mix without publishes, so publishing compared with flipping is the cost of publishes alone, and publishing compared
with quiet is the cost of both. The phases before and after are averaged for this.

A phase begins when no request reads a version of the phase before. Inter-token latency is the time between two outputs
of one request. "late" is the delay of a timer in the rollout worker's event loop, which delays messages of a publish,
too; "gc" is its process's longest collection. "wire" is Mooncake's own write between the same two processes. CUDA
graphs are on; only the batch sizes that these requests make are captured, and the output lists them.

Every publish is printed when it ends. bench/results/adapter_sync-<device>.json is written after every phase, with
"is_partial" until the last.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.shapes import add_shape_options, model_config  # noqa: E402
from bench.sync.adapter_engine import run_engine  # noqa: E402
from bench.sync.trainer_process import KEY, draw_adapters, measure_wire, wait  # noqa: E402

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
"""Seconds that the publish of an adapter from one GPU to another may take."""


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """config.json: a mixture of experts, or a dense model with --experts 0."""
    config = model_config(args)
    if not args.experts:
        dropped = {"moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob",
                   "decoder_sparse_step", "mlp_only_layers"}  # fmt: skip
        config = {key: value for key, value in config.items() if key not in dropped}
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return config


class Trainer:
    """One rank: a decoder with random weights, a publisher of its base and one of its adapter."""

    def __init__(self, config: dict[str, Any], device: str, args: argparse.Namespace) -> None:
        import torch

        from slipstream.conf.architecture.families import read_config
        from slipstream.conf.schema import LoraConfig, TrainerConfig
        from slipstream.trainer.model.build_decoder import build_decoder
        from slipstream.weight_sync.transport.mooncake import MooncakeTransport

        self.device = device
        self.lora = LoraConfig(rank=args.rank, alpha=2.0 * args.rank)
        spec = read_config(config)
        self.decoder = build_decoder(spec, dtype=torch.bfloat16, device=device, trainer=TrainerConfig(lora=self.lora))
        with torch.no_grad():
            for parameter in self.decoder.parameters():
                parameter.normal_(0.0, 0.02)
        self.adapters = [p for name, p in self.decoder.named_parameters() if "lora_" in name]
        self.transport = MooncakeTransport(device=device)
        self.publisher: Any = None

    def connect(self, base: str, slots: str) -> dict[str, Any]:
        """Send the base once, then plan the adapter's publishes."""
        from slipstream.trainer.delivery.adapter_source import AdapterSource
        from slipstream.trainer.delivery.merged_source import TrainerWeightSource
        from slipstream.weight_sync.gc_freeze import freeze_heap

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
        freeze_heap()
        return {
            "base_bytes": report.num_bytes,
            "base_connect_and_publish_s": base_s,
            "connect_s": time.perf_counter() - began,
            "num_tasks": summary.num_tasks,
            "bytes": summary.num_bytes,
        }

    def _publisher(self, source: Any) -> Any:
        from slipstream.conf.schema import WeightSyncConfig
        from slipstream.weight_sync.publish.publisher import Publisher

        return Publisher(
            source, self.transport, rank=0, world_size=1, group=None, config=WeightSyncConfig(), key=KEY,
            device=self.device,
        )  # fmt: skip

    def publish(self, version: int) -> dict[str, Any]:
        """Publish another adapter into a free slot."""
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
    """Run all phases. After each, `keep` gets the figures so far."""

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
    """Publishing compared with flipping and quiet phases, before and after; and how much equal phases differ."""

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
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    add_shape_options(parser, rank=32)
    parser.add_argument("--slots", type=int, default=8, help="of the engine; requests hold theirs to their end")
    parser.add_argument("--pause-mode", default="wait", choices=("wait", "abort", "keep"))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument(
        "--max-tokens", type=int, default=96, help="of a response; lengths lie between half and all of it"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of publishing")
    parser.add_argument("--beside-s", type=float, default=15.0, help="of every other phase")
    parser.add_argument("--every-s", type=float, default=1.0, help="from one publish to the next")
    parser.add_argument("--warm-up", type=int, default=3)
    return parser.parse_args()


def main() -> None:
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
            "environment": facts, "model": config,
            "arguments": {name: str(value) for name, value in vars(args).items() if name not in ("out", "commit")},
            **started, **connected, "wire": wire,
        }  # fmt: skip
        out: Path = args.out or RESULTS / f"adapter_sync-{'gpu' if device == 'cuda' else 'cpu'}.json"

        def keep(phases: dict[str, Any], reports: list[Any]) -> None:  # what comes after may fail
            is_partial = len(phases) < len(PHASES)
            report.update(is_partial=is_partial, phases=phases, reports=reports)
            if not is_partial:
                report["ratios"] = ratios(phases)
            write_report(out, report)

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
