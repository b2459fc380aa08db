"""One rank of bench/kimi_slice.py: Kimi-K2-Thinking's layers in the product's own trainer, measured.

Owns what happens inside a rank's process: forced routing, timing, memory by component, the kernel table.
All of this reaches into a loaded TrainerRank; the product has nothing of it.
"""

import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from bench.environment import ROOT
from slipstream.conf import schema
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.router import Router, Routing
from slipstream.trainer.parallel import local_part
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.step.adamw import MOMENTS
from slipstream.trainer.types import Denominators, Sample, TrainerOptions

SEED = 3


@dataclass(frozen=True)
class Case:
    """One model on the GPUs present. All ranks get the same."""

    name: str
    num_moe_layers: int
    lora_rank: int
    adapter_dtype: str
    state: str
    workloads: dict[str, tuple[tuple[int, ...], float | None]]
    """Name -> lengths of a GPU's sequences, and rows of the fullest expert over the mean (None: drawn uniformly)."""
    repeats: int
    is_tiny: bool
    device: str
    profile: bool = False
    experts_a_gpu: int = 48


def hf_config(case: Case, world_size: int) -> dict[str, Any]:
    """Kimi-K2-Thinking's config.json with fewer layers, and `experts_a_gpu` experts per GPU."""
    config = yaml.safe_load((ROOT / "conf" / "model" / "kimi_k2_thinking.yaml").read_text())["hf_config"]
    changes: dict[str, Any] = {
        "num_hidden_layers": 1 + case.num_moe_layers,
        "n_routed_experts": case.experts_a_gpu * world_size,
    }
    if case.is_tiny:
        changes |= {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 256}
        changes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32}
        changes |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return config | changes


# ---- routing ----


def zipf_exponent(num_experts: int, top_k: int, max_over_mean: float, device: torch.device) -> float:
    """Exponent s of p(e) ~ 1 / (e + 1)^s with which the fullest expert gets max_over_mean times the mean."""
    low, high = 0.0, 3.0
    for _ in range(20):
        middle = (low + high) / 2
        load = torch.bincount(drawn(num_experts, top_k, middle, 1 << 14, 0, device).flatten(), minlength=num_experts)
        low, high = (middle, high) if float(load[0]) / float(load.float().mean()) < max_over_mean else (low, middle)
    return (low + high) / 2


def drawn(num_experts: int, top_k: int, exponent: float, num_tokens: int, seed: int, device: torch.device) -> Tensor:
    """Draw experts (T, K) without replacement (Gumbel); expert 0 is the likeliest."""
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.rand((num_tokens, num_experts), generator=generator, device=device).clamp_min_(1e-12)
    log_p = -exponent * torch.arange(1, num_experts + 1, device=device).log()
    return (log_p - noise.log().neg().log()).topk(top_k, dim=-1).indices


def rank_imbalance(max_over_mean: float | None, top_k: int, device: torch.device) -> float:
    """Rows of the fullest of 8 ranks over the mean, for 384 experts placed at random, mean of 60 layers."""
    exponent = 0.0 if max_over_mean is None else zipf_exponent(384, top_k, max_over_mean, device)
    load = torch.bincount(drawn(384, top_k, exponent, 1 << 16, 0, device).flatten(), minlength=384).float().cpu()
    ratios = []
    for layer in range(60):
        order = torch.randperm(384, generator=torch.Generator().manual_seed(layer))
        ranks = load[order].view(8, 48).sum(1)
        ratios.append(float(ranks.max() / ranks.mean()))
    return statistics.mean(ratios)


class ForcedRouting:
    """Replaces each router's choice but not its work: it still computes scores, and its weights and gradients count."""

    def __init__(self, rank: TrainerRank, layout_rank: int, num_tokens: int, device: torch.device) -> None:
        self._routers = [m for m in rank.decoder.modules() if isinstance(m, Router)]
        self._forwards = [router.forward for router in self._routers]
        self._rank, self._num_tokens, self._device = layout_rank, num_tokens, device

    def force(self, max_over_mean: float | None) -> dict[str, float]:
        """Force uniform (None) or Zipf routing, with experts in another order in every layer. Returns facts."""
        moe = self._routers[0].moe
        exponent = 0.0
        if max_over_mean is not None:
            exponent = zipf_exponent(moe.num_experts, moe.top_k, max_over_mean, self._device)
        worst = []
        for layer, (router, forward) in enumerate(zip(self._routers, self._forwards, strict=True)):
            seed = 1000 * layer + self._rank
            choice = drawn(moe.num_experts, moe.top_k, exponent, self._num_tokens, seed, self._device)
            order = torch.randperm(moe.num_experts, generator=torch.Generator().manual_seed(layer)).to(self._device)
            experts_TK = order[choice]
            load = torch.bincount(experts_TK.flatten(), minlength=moe.num_experts)
            if dist.is_initialized():
                dist.all_reduce(load)
            worst.append(float(load.max() / load.float().mean()))
            router.forward = _forced(forward, experts_TK)  # pyright: ignore[reportAttributeAccessIssue]
        return {"exponent": exponent, "expert_max_over_mean": statistics.mean(worst)}


def _forced(forward: Callable[[Tensor], Routing], experts_TK: Tensor) -> Callable[[Tensor], Routing]:
    return lambda x_TH, recorded=None: Routing(forward(x_TH).weights_TK, experts_TK[: x_TH.shape[0]])


# ---- one rank ----


def make_rank(case: Case, rank: int, world_size: int, rendezvous: str) -> TrainerRank:
    """Make a loaded rank with random INT4 experts."""
    config = hf_config(case, world_size)
    made = TrainerRank(
        TrainerOptions(
            model=schema.ModelConfig(init=schema.Init.random, hf_config=config, dtype=schema.DType.bfloat16),
            trainer=schema.TrainerConfig(
                num_ranks=world_size,
                ep_size=world_size,
                lora=schema.LoraConfig(
                    rank=case.lora_rank, alpha=2.0 * case.lora_rank, dtype=schema.DType(case.adapter_dtype)
                ),
                optim=schema.OptimConfig(lr=1e-5, state=schema.OptimState(case.state)),
                activations=schema.Activations.recompute,
            ),
            algorithm=schema.AlgorithmConfig(objective=schema.Objective.sft),
            sampling_temperature=1.0,
            weight_sync=schema.WeightSyncConfig(),
            seed=SEED,
            num_steps=1000,
            rendezvous=rendezvous,
            device=case.device,
            hf_config=config,
            sync_key=b"slipstream-bench-kimi-slice",
        ),
        rank=rank,
    )
    made.load()
    return made


def samples_of(lengths: tuple[int, ...], vocab_size: int, rank: int, version: int) -> Any:
    made = []
    for index, length in enumerate(lengths):
        positions = np.arange(length)
        made.append(
            Sample(
                token_ids=np.random.default_rng(1000 * rank + index).integers(0, vocab_size, length).astype(np.int32),
                loss_mask=positions > 0,
                rollout_logprobs=np.zeros(length, np.float32),
                advantages=np.ones(length, np.float32),
                oldest_version=version,
            )
        )
    return made


def step(made: TrainerRank, rank: int, world_size: int, lengths: tuple[int, ...]) -> float:
    """Run forward, backward and update. Returns the seconds until the device is done."""
    version = made.policy_version
    samples = samples_of(lengths, made.decoder.spec.vocab_size, rank, version)
    num_tokens = sum(sample.num_valid_tokens for sample in samples) * world_size
    if dist.is_initialized():
        dist.barrier()
    _sync(made._device)
    began = time.perf_counter()
    made.forward_backward([samples], Denominators(num_tokens, len(samples) * world_size, version))
    if not made.optimizer_step().is_finite:
        raise RuntimeError("the update was refused: a loss or the norm is not finite, so this is no step to time")
    _sync(made._device)
    return time.perf_counter() - began


def timed_steps(
    made: TrainerRank, rank: int, world_size: int, lengths: tuple[int, ...], repeats: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Median over repeats of the slowest rank's seconds, after a step that is not counted."""
    seconds = []
    for number in range(1 + repeats):
        say(f"step {number} of {repeats}")
        seconds.append(step(made, rank, world_size, lengths))
    times = torch.tensor(seconds[1:])
    if dist.is_initialized():
        times = times.to(made._device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return {"median_s": float(times.median()), "min_s": float(times.min()), "max_s": float(times.max())}


def memory(made: TrainerRank) -> dict[str, float]:
    """GB on this rank by component, right after a step; the rest of the peak is activations and scratch."""
    decoder = made.decoder

    def size(tensors: Any) -> float:
        return sum(t.numel() * t.element_size() for t in tensors) / 1e9

    banks = [m.packed for m in decoder.modules() if isinstance(m, Experts) and m.packed is not None]
    frozen = [local_part(p)[0] for p in decoder.parameters() if not p.requires_grad]
    adapters = list(made.learner.shards.values())
    state = [t for name, t in made.learner.state_tensors().items() if any(m in name for m in MOMENTS)]
    found = {
        "packed_experts": sum(bank.num_bytes for bank in banks) / 1e9,
        "unpacked_experts": 2
        * sum(np.prod(shape) for shape in banks[0].shapes.values())
        * decoder.dtype.itemsize
        / 1e9,
        "dense_weights": size(frozen),
        "adapters": size(adapters),
        "gradients": size(adapters),
        "moments": size(state),
    }
    if made._device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated() / 1e9
        found["activations_and_scratch"] = found["peak"] - sum(v for k, v in found.items() if k != "peak")
    return {name: float(value) for name, value in found.items()}


def exchange_seconds(num_rows: int, hidden: int, device: torch.device) -> dict[str, float]:
    """An all-to-all of one layer's rows, evenly split: seconds, and bytes per second that leave a GPU."""
    if not dist.is_initialized():
        return {}
    world_size = dist.get_world_size()
    rows = torch.zeros(num_rows // world_size * world_size, hidden, dtype=torch.bfloat16, device=device)
    out, times = torch.empty_like(rows), []
    for _ in range(8):
        _sync(device)
        began = time.perf_counter()
        dist.all_to_all_single(out, rows)
        _sync(device)
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[3:])
    sent = rows.numel() * 2 * (world_size - 1) / world_size
    return {"all_to_all_s": seconds, "all_to_all_gb_s": sent / seconds / 1e9}


def run_rank(rank: int, world_size: int, case: Case, rendezvous: str, out: str) -> None:
    """Run one case in this process. Rank 0 writes the results and prints them."""
    faulthandler.enable()  # if a library dies by a signal, the stack shows the call
    if case.device == "cpu":
        torch.set_num_threads(1)
    for result in run_case(rank, world_size, rendezvous, case):
        if rank == 0:
            half = Path(out).with_suffix(".half")  # so that a finished file is always whole
            half.write_text(json.dumps(result))
            half.rename(out)
    if rank == 0:
        for name, row in result["routings"].items():
            peak = row["memory_gb"].get("peak", float("nan"))
            print(f"{case.name:14} {name:20} {row['median_s']:.3f} s a step, peak {peak:.1f} GB", flush=True)


def run_case(rank: int, world_size: int, rendezvous: str, case: Case) -> Iterator[dict[str, Any]]:
    """Run every workload on one model. Yields the results so far; the profile comes last, because it sometimes dies.

    Prints each part's name to stderr before it runs, so that after a signal its place is known.
    """

    def say(what: str) -> None:
        print(f"{case.name}, rank {rank}: {what}", file=sys.stderr, flush=True)

    say("load")
    began = time.perf_counter()
    made = make_rank(case, rank, world_size, rendezvous)
    result: dict[str, Any] = {"case": asdict(case), "load_s": time.perf_counter() - began, "routings": {}}
    result["backends"] = made.decoder.backends
    config = hf_config(case, world_size)
    first_lengths, first_wanted = next(iter(case.workloads.values()))
    num_tokens = sum(first_lengths)
    say("first step")  # compiles kernels and the optimizer
    step(made, rank, world_size, first_lengths)
    routing = ForcedRouting(made, rank, num_tokens, made._device)
    for name, (lengths, wanted) in case.workloads.items():
        facts = routing.force(wanted)
        facts["rank_max_over_mean_at_ep8"] = rank_imbalance(wanted, config["num_experts_per_tok"], made._device)
        if case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = timed_steps(made, rank, world_size, lengths, case.repeats, lambda what: say(f"{name}, {what}"))  # noqa: B023
        result["routings"][name] = facts | times | {"memory_gb": memory(made)}
        yield result
    say("exchange")
    result |= exchange_seconds(num_tokens * config["num_experts_per_tok"], config["hidden_size"], made._device)
    yield result
    if case.profile:
        say("profile")
        routing.force(first_wanted)
        step(made, rank, world_size, first_lengths)
        result["kernels"] = profile(made, lambda: step(made, rank, world_size, first_lengths))
        yield result
    say("shutdown")
    made.shutdown()


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- where the time goes ----

CATEGORIES = (
    ("exchange and gather over GPUs", ("nccl",)),
    ("unpack INT4", ("dequantize_int4",)),
    ("attention", ("flash", "fmha", "attention", "sdp", "cudnn")),
    ("heads of latent attention, norms", ("_latent_heads", "_rms_norm", "_norm_rotate")),
    ("optimizer", ("_adamw",)),
    ("adapters of experts", ("gather_project", "low_rank", "_project")),
    ("SwiGLU and its backward", ("activate", "swiglu")),
    ("gather, combine, sort", ("_gather", "weighted_sum", "combine", "counting", "count", "_sort", "place")),
    ("grouped products", ("grouped", "_product", "GroupProblemShape", "GemmUniversal")),
    ("dense products", ("gemm", "nvjet", "cutlass", "cublas", "splitK")),
    ("copies and fills", ("Memcpy", "Memset", "copy", "fill", "FillFunctor", "CatArray")),
)
"""Kernels by parts of their names; the first category that matches."""


def profile(made: TrainerRank, work: Callable[[], Any]) -> dict[str, Any]:
    """Device milliseconds of one step: kernels by category, the longest of each, and the device's idle times."""
    if made._device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
    table: dict[str, Any] = {}
    for event in sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total):
        if event.self_device_time_total <= 0:
            continue
        names = (c for c, parts in CATEGORIES if any(part.lower() in event.key.lower() for part in parts))
        _note(table, next(names, "elementwise, norms, optimizer"), event.key, event.self_device_time_total, event.count)
    found = [event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda event: event.time_range.start)
    gaps: dict[tuple[str, str], list[float]] = {}
    last = found[0] if found else None
    for event in found[1:]:
        assert last is not None
        if event.time_range.start > last.time_range.end:
            names = (last.name[:48], event.name[:48])
            gaps.setdefault(names, []).append(event.time_range.start - last.time_range.end)
        last = max(last, event, key=lambda one: one.time_range.end)
    for (before, after), waits in sorted(gaps.items(), key=lambda item: -sum(item[1])):
        _note(table, "idle between kernels", f"{before} .. {after}", sum(waits), len(waits))
    return table


def _note(table: dict[str, Any], category: str, name: str, microseconds: float, count: int) -> None:
    entry = table.setdefault(category, {"ms": 0.0, "calls": 0, "longest": []})
    entry["ms"] += microseconds / 1e3
    entry["calls"] += count
    if len(entry["longest"]) < 12:
        entry["longest"].append([name[:100], microseconds / 1e3, count])
