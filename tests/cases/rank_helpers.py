"""A tiny policy, deterministic samples, and a way to run TrainerRank in several processes; shared by the tests
of this folder.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from cases.processes import run_processes
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import (
    Activations,
    AlgorithmConfig,
    DType,
    Init,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParityConfig,
    RunConfig,
    TrainerConfig,
    TrainMode,
    WeightSyncConfig,
)
from slipstream.trainer.parallel import sharded_rows
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.types import Denominators, LossStats, Sample, TrainerOptions

VOCAB = 40
LORA = LoraConfig(rank=4, alpha=8.0)
SYNC_KEY = b"0123456789abcdef-test-key"
MOE_CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def save_state(rank: TrainerRank, folder: Path) -> None:
    """Begin a checkpoint, and wait until this rank's files are there."""
    rank.states.begin_checkpoint(folder)
    while not rank.states.has_written():
        time.sleep(0.01)


class _OfFewTokens(TrainerConfig):
    """The head computes five tokens at a time."""

    __slots__ = ()

    def logprob_chunk_tokens(self, vocab_size: int) -> int:
        return 5


def make_rank(
    rank: int = 0,
    world_size: int = 1,
    rendezvous: str = "",
    *,
    ep_size: int = 1,
    cp_size: int = 1,
    mode: TrainMode = TrainMode.lora,
    dtype: DType = DType.float32,
    algorithm: AlgorithmConfig | None = None,
    optim: OptimConfig | None = None,
    lora_dtype: DType = DType.float32,
    hf_config: dict[str, Any] | None = None,
    init_from: Path | None = None,
    weight_sync: WeightSyncConfig | None = None,
    parity: ParityConfig | None = None,
    activations: Activations = Activations.recompute,
    is_loaded: bool = True,
) -> TrainerRank:
    """A rank of the tiny policy."""
    hf_config = dict(hf_config or MOE_CONFIG)
    made = TrainerRank(
        TrainerOptions(
            model=ModelConfig(init=Init.random, hf_config=hf_config | {"initializer_range": 0.2}, dtype=dtype),
            trainer=_OfFewTokens(
                num_ranks=world_size,
                ep_size=ep_size,
                cp_size=cp_size,
                mode=mode,
                lora=replace(LORA, dtype=lora_dtype, init_from=None if init_from is None else str(init_from)),
                optim=optim or OptimConfig(lr=1e-2),
                activations=activations,
            ),
            algorithm=algorithm or AlgorithmConfig(),
            sampling_temperature=0.9,
            weight_sync=weight_sync or WeightSyncConfig(),
            seed=3,
            num_steps=10,
            rendezvous=rendezvous,
            device="cpu",
            hf_config=hf_config,
            sync_key=SYNC_KEY,
            parity=parity or ParityConfig(),
        ),
        rank=rank,
    )
    if is_loaded:
        made.load()
    return made


def rank_of(config: RunConfig, key: bytes, *, hf_config: JsonObject, device: str = "cpu") -> TrainerRank:
    """The only rank of a run of four steps, not loaded yet. `hf_config` is prepare_model's."""
    return TrainerRank(
        TrainerOptions(
            model=config.model,
            trainer=config.trainer,
            algorithm=config.algorithm,
            sampling_temperature=1.0,
            weight_sync=config.weight_sync,
            seed=3,
            num_steps=4,
            device=device,
            hf_config=hf_config,
            sync_key=key,
        )
    )


def trained(rank: TrainerRank) -> list[tuple[str, torch.nn.Parameter]]:
    """What this rank trains, by name."""
    return [(name, param) for name, param in rank.decoder.named_parameters() if param.requires_grad]


def values_of(rank: TrainerRank) -> dict[str, torch.Tensor]:
    """A copy of what this rank trains."""
    return {name: sharded_rows(name, param).detach().clone() for name, param in trained(rank)}


def draw(rank: TrainerRank, seed: int, std: float) -> None:
    """Give everything that this rank trains other values."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in trained(rank):
        values = sharded_rows(name, param).detach()
        values.copy_(torch.randn(values.shape, generator=generator) * std)


def are_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """The same names, the same values to the bit."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def make_samples(count: int = 5, version: int = 0) -> list[Sample]:
    """Sequences of 4, 6, 8, ... tokens, of which all but the first three count."""
    samples = []
    for index in range(count):
        draw = np.random.default_rng(index)
        num_tokens = 4 + 2 * index
        mask = np.arange(num_tokens) >= 3
        samples.append(
            Sample(
                token_ids=draw.integers(0, VOCAB, num_tokens).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, draw.normal(-3.5, 0.3, num_tokens), 0).astype(np.float32),
                advantages=np.where(mask, draw.normal(), 0).astype(np.float32),
                oldest_version=version,
            )
        )
    return samples


def count(samples: list[Sample], version: int = 0) -> Denominators:
    return Denominators(sum(sample.num_valid_tokens for sample in samples), len(samples), version)


def shard_dim(param: torch.Tensor) -> int:
    """Dim along which ranks' parts of a parameter follow each other."""
    if isinstance(param, DTensor):
        (placement,) = param.placements
        assert isinstance(placement, Shard)
        return placement.dim
    return 0


def fill_adapters(rank: TrainerRank, world_size: int) -> None:
    """Give every B values that depend on its name and place alone, so that A has gradients too, in any layout."""
    number = dist.get_rank() if world_size > 1 else 0
    for name, param in trained(rank):
        dim = shard_dim(param)
        shape = list(param.shape)
        if not isinstance(param, DTensor):
            shape[0] *= world_size  # plain tensors with several ranks are experts, divided over the ep group
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        full = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if "lora" in name:
            parts = torch.chunk(full, world_size, dim) if world_size > 1 else (full,)
            if number < len(parts):  # a short dim leaves the last ranks nothing
                sharded_rows(name, param).detach().copy_(parts[number])


def local_gradients(rank: TrainerRank) -> dict[str, tuple[int, torch.Tensor]]:
    """Name -> (dim along which ranks concatenate, this rank's gradient)."""
    gradients = {}
    for name, param in trained(rank):
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        assert grad is not None, name
        gradients[name] = (shard_dim(param), grad.clone())
    return gradients


def join_ranks(parts: list[dict[str, tuple[int, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Whole gradients from those of all ranks."""
    return {name: torch.cat([part[name][1] for part in parts], dim) for name, (dim, _) in parts[0].items()}


def spawn(work: Callable[..., Any], world_size: int, folder: Path, cases: list[tuple[Any, ...]]) -> list[list[Any]]:
    """Per case, what work(rank, world_size, rendezvous, folder of the case, *case) returned on each rank.

    One set of processes runs all cases, because starting a process takes longer than any of them.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folders = [folder / str(index) for index in range(len(cases))]
    for one in folders:
        one.mkdir()
    rendezvous = [f"file://{one}/meeting" for one in folders]
    run_processes(_run_cases, (work, world_size, rendezvous, folders, cases), world_size)
    return [[torch.load(one / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)] for one in folders]


def _run_cases(
    rank: int,
    work: Callable[..., Any],
    world_size: int,
    rendezvous: list[str],
    folders: list[Path],
    cases: list[tuple[Any, ...]],
) -> None:
    for meeting, folder, case in zip(rendezvous, folders, cases, strict=True):
        torch.save(work(rank, world_size, meeting, folder, *case), folder / f"rank{rank}.pt")


def step(rank: TrainerRank) -> LossStats:
    """A batch of the rank's version, and an update that is applied."""
    samples = make_samples(version=rank.policy_version)
    stats = rank.forward_backward([samples[:3], samples[3:]], count(samples, rank.policy_version))
    assert rank.optimizer_step().is_finite
    return stats
