"""Promise of trainer.cuda_graph_tokens: replayed microbatches give what the decoder gives, kernel by kernel."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.processes import run_processes
from cases.tiny_configs import DEEPSEEK, MIXED, MOE
from cases.tiny_models import relative_error
from torch.distributed.tensor import DTensor

from slipstream.conf.schema import (
    AlgorithmConfig,
    DType,
    Init,
    LoraConfig,
    ModelConfig,
    Objective,
    ParityConfig,
    TrainerConfig,
    TrainMode,
    WeightSyncConfig,
)
from slipstream.trainer.model import graphs
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.step.microbatches import made_up_samples
from slipstream.trainer.types import Denominators, Sample, TrainerOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHORT = ([200, 30, 750, 90], [60, 600, 370, 1], [533, 333, 133, 60])
"""Lengths of microbatches of one padded size: 1,152 tokens, 8 sequences of at most 1,024."""
LONG = ([1500, 1100], [1500, 1100], [1500, 1100])
FAMILIES = {
    "moe": {**MOE, "hidden_size": 512, "head_dim": 64, "num_experts_per_tok": 2},
    "dense_and_moe": {**MIXED, "hidden_size": 512, "head_dim": 64},
    "latent_attention": {**DEEPSEEK, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16},
}


def make_rank(
    hf_config: dict[str, Any], *, cuda_graph_tokens: int, index: int = 0, rendezvous: str = "", **options: Any
) -> TrainerRank:
    chunks = type("OfFewTokens", (TrainerConfig,), {"logprob_chunk_tokens": lambda self, vocab_size: 256})
    trainer = chunks(lora=LoraConfig(rank=8, alpha=16.0), cuda_graph_tokens=cuda_graph_tokens, **options)
    rank = TrainerRank(
        TrainerOptions(
            model=ModelConfig(init=Init.random, hf_config=hf_config, dtype=DType.bfloat16),
            trainer=trainer,
            algorithm=AlgorithmConfig(objective=Objective.sft),
            sampling_temperature=1.0,
            weight_sync=WeightSyncConfig(),
            seed=3,
            num_steps=100,
            rendezvous=rendezvous,
            device="cuda",
            hf_config=hf_config,
            sync_key=b"0123456789abcdef-test-key",
            parity=ParityConfig(replay_routing=False),
        ),
        rank=index,
    )
    rank.load()
    return rank


def samples_of(rank: TrainerRank, lengths: list[int], seed: int, *, with_routes: bool) -> list[Sample]:
    spec, draw = rank.decoder.spec, np.random.default_rng(seed)
    made = made_up_samples(lengths, spec.vocab_size, 0, spec.moe if with_routes else None)
    return [
        replace(sample, token_ids=draw.integers(0, spec.vocab_size, sample.num_tokens).astype(np.int32))
        for sample in made
    ]


def gradients_of(
    rank: TrainerRank, microbatches: list[list[int]], *, with_routes: bool = False, num_ranks: int = 1
) -> list[tuple[dict[str, float], list[torch.Tensor]]]:
    """Sums and gradients of three steps without updates: each microbatch alone, then all in one step, twice."""
    results = []
    for step in [*([lengths] for lengths in microbatches), microbatches, microbatches]:
        batch = [samples_of(rank, lengths, seed, with_routes=with_routes) for seed, lengths in enumerate(step)]
        num_tokens = sum(sample.num_valid_tokens for samples in batch for sample in samples)
        num_tokens = num_tokens if num_ranks == 1 else 2000  # which ranks must agree upon
        stats = rank.forward_backward(batch, Denominators(num_tokens, 8, 0, num_possible_tokens=num_tokens))
        trained = [p.grad for p in rank.decoder.parameters() if p.requires_grad and p.grad is not None]
        own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in trained]
        results.append((stats.sums, [gradient.clone() for gradient in own]))
        rank.learner.drop_gradients()
    return results


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["padded", "cudnn"])
@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_are_the_decoder(family: str, mode: TrainMode, lengths: tuple[list[int], ...]) -> None:
    """All but a size's first microbatch are replayed, and gradients of a step's microbatches add up."""
    plain, replayed = (make_rank(FAMILIES[family], mode=mode, cuda_graph_tokens=size) for size in (0, 8192))
    wanted, found = (gradients_of(rank, list(lengths)) for rank in (plain, replayed))
    assert plain.policy.graphs is None and replayed.policy.graphs is not None
    assert replayed.policy.graphs.num_replays == 8
    for (sums, gradients), (expected_sums, expected) in zip(found, wanted, strict=True):
        for name, value in expected_sums.items():
            assert sums[name] == pytest.approx(value, rel=1e-2), name
        assert len(gradients) == len(expected) > 8
        for one, other in zip(gradients, expected, strict=True):
            assert relative_error(one, other) < 5e-2
    assert any(gradient.any() for gradient in found[0][1])


def train_on_one_of_two(index: int, folder: str, cuda_graph_tokens: int, mode: TrainMode) -> None:
    """The second rank's microbatches are shorter; each pads to the size of the longer."""
    rank = make_rank(
        FAMILIES["moe"], mode=mode, cuda_graph_tokens=cuda_graph_tokens, num_ranks=2, ep_size=2, index=index,
        rendezvous=f"file://{folder}/meet{cuda_graph_tokens}",
    )  # fmt: skip
    microbatches = [lengths[index:] for lengths in SHORT]
    found = [
        (sums, [one.cpu() for one in gradients]) for sums, gradients in gradients_of(rank, microbatches, num_ranks=2)
    ]
    num_replays = 0 if rank.policy.graphs is None else rank.policy.graphs.num_replays
    torch.save((num_replays, found), f"{folder}/{cuda_graph_tokens}-{index}.pt")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
def test_replays_of_two_ranks_are_the_decoder_with_its_exchanges(tmp_path: Path, mode: TrainMode) -> None:
    for cuda_graph_tokens in (0, 8192):
        run_processes(train_on_one_of_two, (str(tmp_path), cuda_graph_tokens, mode), 2)
    for index in (0, 1):
        (_, wanted), (num_replays, found) = (torch.load(tmp_path / f"{size}-{index}.pt") for size in (0, 8192))
        assert num_replays == 8
        for (sums, gradients), (expected_sums, expected) in zip(found, wanted, strict=True):
            assert sums["loss/total_sum"] == pytest.approx(expected_sums["loss/total_sum"], rel=1e-2)
            assert len(gradients) == len(expected) > 8
            assert all(relative_error(one, other) < 5e-2 for one, other in zip(gradients, expected, strict=True))
        assert any(gradient.any() for gradient in found[0][1])


def test_replays_use_new_weights_and_count_flipped_routes() -> None:
    ranks = [make_rank(FAMILIES["moe"], cuda_graph_tokens=size) for size in (0, 8192)]
    for step in range(4):
        sums = []
        for rank in ranks:
            batch = [samples_of(rank, SHORT[step % 3], step, with_routes=True)]
            batch = [[replace(sample, oldest_version=rank.policy_version) for sample in samples] for samples in batch]
            num_tokens = sum(sample.num_valid_tokens for samples in batch for sample in samples)
            denominators = Denominators(num_tokens, 4, rank.policy_version, num_possible_tokens=num_tokens)
            sums.append(rank.forward_backward(batch, denominators).sums)
            assert rank.optimizer_step().is_finite
        plain, replayed = sums
        assert replayed["loss/total_sum"] == pytest.approx(plain["loss/total_sum"], rel=1e-2)
        assert replayed["parity/num_routings"] == plain["parity/num_routings"]
        assert replayed["parity/num_flipped"] == pytest.approx(plain["parity/num_flipped"], rel=0.05)
    assert ranks[1].policy.graphs is not None and ranks[1].policy.graphs.num_replays == 3


def test_a_capture_that_fails_leaves_the_run_as_it_was(monkeypatch: Any, caplog: Any) -> None:
    """The microbatch runs kernel by kernel, and so do all later ones."""

    class Refused(graphs.CapturedPass):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    plain, refused = (make_rank(FAMILIES["moe"], cuda_graph_tokens=size) for size in (0, 8192))
    monkeypatch.setattr(graphs, "CapturedPass", Refused)
    with caplog.at_level(logging.WARNING):
        wanted, found = (gradients_of(rank, list(SHORT)) for rank in (plain, refused))
    assert "run without CUDA graphs from now on" in caplog.text
    assert refused.policy.graphs is not None and refused.policy.graphs.num_replays == 0
    for (_, gradients), (_, expected) in zip(found, wanted, strict=True):
        assert all(relative_error(one, other) < 2e-2 for one, other in zip(gradients, expected, strict=True))
