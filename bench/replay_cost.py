"""What routing replay costs: tokens/s of an engine that records routes, tokens/s of a trainer that replays them, bytes.

    python bench/replay_cost.py                          Qwen3-30B-A3B's width, 8 layers: about two minutes on an H100
    python bench/replay_cost.py --tiny --part trainer    runs on a CPU, whose engine records nothing

Engine: two engines with dummy weights and CUDA graphs, one after the other, without and with
enable_return_routed_experts. Each samples the same number of tokens from new prompts --rounds times, after a round that
does not count. The second one's routes also go through rollout/routes.py, which is timed apart, as it runs on the event
loop. Trainer: one decoder with random weights and LoRA goes forward and backward over one microbatch, in turn with its
routers' choice and with that choice replayed from bytes. It counts the numbers that differ from a first forward, in a
second one and with replay; both should be 0.

bench/results/replay_cost-<device>.json has every round; the table shows medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench.environment import environment  # noqa: E402
from bench.shapes import add_shape_options, model_config, shrink  # noqa: E402
from slipstream.conf.schema import Device, DType, LoraConfig, RolloutConfig, SamplingConfig, TrainerConfig  # noqa: E402
from slipstream.rollout.types import Rollout, RoutingShape  # noqa: E402

VOCAB_USED = 500
"""Prompts are of the first tokens: every size of the model has them."""


async def sample(args: argparse.Namespace, routing: RoutingShape | None, folder: Path) -> dict[str, Any]:
    """Rounds of one engine: tokens/s, and what was recorded."""
    from slipstream.rollout.engine.vllm_engine import VllmEngine
    from slipstream.rollout.routes import read_routes

    config = RolloutConfig(
        max_model_len=args.prompt_tokens + args.response_tokens + 1, max_num_seqs=args.requests,
        gpu_memory_utilization=0.6, sampling=SamplingConfig(max_tokens=args.response_tokens, stop_at_eos=False),
    )  # fmt: skip
    engine = VllmEngine(folder, config, dtype=DType.bfloat16, device=Device.cuda, seed=1, routing=routing)
    started = time.perf_counter()
    await engine.start()
    found: dict[str, Any] = {"start_s": time.perf_counter() - started, "tokens_per_s": []}
    engine.version = 0
    rollouts: list[Rollout] = []
    try:
        for number in range(1 + args.rounds):
            rng = np.random.default_rng(number)
            prompts = rng.integers(0, VOCAB_USED, (args.requests, args.prompt_tokens)).tolist()
            began = time.perf_counter()
            groups = [engine.generate_group(prompt, 1, config.sampling, seed=None) for prompt in prompts]
            rollouts = [rollout for group in await asyncio.gather(*groups) for rollout in group]
            num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
            found["tokens_per_s"].append(num_tokens / (time.perf_counter() - began))
        del found["tokens_per_s"][0]
    finally:
        engine.shutdown()
    if routing is not None:
        routes = [rollout.routes for rollout in rollouts if rollout.routes is not None]
        num_positions = sum(len(one.is_recorded) for one in routes)
        assert all(one.is_recorded.all() for one in routes), "vLLM left routes out"
        as_returned = np.zeros((len(routes[0].is_recorded), args.layers, routing.top_k), routing.dtype)
        as_returned[:, list(routing.layers)] = routes[0].experts
        began = time.perf_counter()
        read_routes(as_returned, routing, len(as_returned) + 1)
        found["read_routes_ms"] = 1e3 * (time.perf_counter() - began)
        found["bytes_per_token"] = sum(r.experts.nbytes + r.is_recorded.nbytes for r in routes) / num_positions
    return found


def train(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Seconds of forward and backward, free and replayed, in turn."""
    from slipstream.conf.architecture.families import read_config
    from slipstream.trainer.model.build_decoder import build_decoder
    from slipstream.trainer.moe.replay import RecordedRoutes
    from slipstream.trainer.moe.router import Router

    spec = read_config(model_config(args))
    assert spec.moe is not None
    decoder = build_decoder(
        spec, dtype=torch.bfloat16, device=device, trainer=TrainerConfig(lora=LoraConfig(rank=args.rank))
    )
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    num_tokens = args.microbatch_tokens
    ids = torch.randint(0, VOCAB_USED, (num_tokens,), device=device, generator=generator)
    batch = (ids, torch.arange(num_tokens, device=device), torch.tensor([0, num_tokens]))

    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, routing: chosen.append(routing.experts_TK))
        for module in decoder.modules()
        if isinstance(module, Router)
    ]
    with torch.no_grad():
        free_TH = decoder(*batch)
    for hook in hooks:
        hook.remove()
    dtype = np.uint8 if spec.moe.num_experts <= 256 else np.int16
    recorded = torch.stack(chosen, dim=1).cpu().numpy().astype(dtype)
    everyone = np.ones(num_tokens, dtype=bool)

    def routes() -> RecordedRoutes:
        """As a microbatch brings them: from the host."""
        return RecordedRoutes(torch.from_numpy(recorded).to(device), torch.from_numpy(everyone).to(device))

    with torch.no_grad():
        again_TH, replayed_TH = decoder(*batch), decoder(*batch, routes())
    differing = {"free_again": num_differing(again_TH, free_TH), "replayed": num_differing(replayed_TH, free_TH)}

    def step(*, replays: bool) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        decoder(*batch, routes() if replays else None).float().square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        decoder.zero_grad()
        return seconds

    seconds: dict[str, list[float]] = {"free_s": [], "replayed_s": []}
    for number in range(2 + args.rounds):
        for name, replays in (("free_s", False), ("replayed_s", True)):
            taken = step(replays=replays)
            if number >= 2:  # the first compile kernels
                seconds[name].append(taken)
    free, replayed = (num_tokens / statistics.median(values) for values in seconds.values())
    return {
        **seconds,
        "differing": differing,
        "free_tokens_per_s": free,
        "replayed_tokens_per_s": replayed,
        "cost": 1 - replayed / free,
    }


def num_differing(mine_TH: torch.Tensor, wanted_TH: torch.Tensor) -> int:
    """How many hidden states of the last layer differ by a bit."""
    return int((mine_TH != wanted_TH).sum())


def main() -> None:
    """Measure, print a table, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, rank=32)
    parser.set_defaults(layers=8)
    parser.add_argument("--part", choices=("engine", "trainer", "both"), default="both")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="two small layers")
    parser.add_argument("--commit", help="of a tree that is not a git checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        shrink(args)
        args.microbatch_tokens, args.response_tokens = 256, 32
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a process that has asked for CUDA cannot fork an engine
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {"environment": environment(args.commit), "options": {**vars(args), "out": None}}
    if args.part != "trainer":
        if device == "cpu":
            parser.error("the CPU engine records no routes: --part trainer is what can be measured here")
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "config.json").write_text(json.dumps(model_config(args)))
            routing = RoutingShape(tuple(range(args.layers)), min(8, args.experts), args.experts)
            without = asyncio.run(sample(args, None, Path(name)))
            recording = asyncio.run(sample(args, routing, Path(name)))
        plain, slower = (statistics.median(one["tokens_per_s"]) for one in (without, recording))
        report["engine"] = {"without": without, "recording": recording, "cost": 1 - slower / plain}
        print(f"engine   {plain:10,.0f} tokens/s   recording {slower:10,.0f}   cost {1 - slower / plain:6.1%}")
        print(f"         {recording['bytes_per_token']:.0f} bytes per token, "
              f"{recording['read_routes_ms']:.2f} ms to read those of one response")  # fmt: skip
    if args.part != "engine":
        found = report["trainer"] = train(args, device)
        print(f"trainer  {found['free_tokens_per_s']:10,.0f} tokens/s   replaying "
              f"{found['replayed_tokens_per_s']:10,.0f}   cost {found['cost']:6.1%}")  # fmt: skip
        print(f"         numbers that differ from the first forward: {found['differing']}")
    out = args.out or ROOT / "bench" / "results" / f"replay_cost-{device}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
