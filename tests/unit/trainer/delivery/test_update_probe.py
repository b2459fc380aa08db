"""Promises of trainer/delivery/probes.py: the figure is the share of an update that engines' weights lack."""

from collections.abc import Sequence

import pytest
import torch
from cases.rank_helpers import make_rank
from cases.tiny_configs import MOE

from slipstream.conf.schema import DType, MergeRounding, TrainMode, WeightSyncConfig
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.weights.quantization import BlockFp8
from slipstream.trainer.weights.shards import HeldTensor, local_shards


def rank_with_updates_of(std: float, rounding: MergeRounding, **options: object) -> TrainerRank:
    """Bases of about 0.1, whose bfloat16 step is 2^-11 to 2^-12."""
    rank = make_rank(dtype=DType.bfloat16, weight_sync=WeightSyncConfig(rounding=rounding), **options)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in rank.decoder.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 1.0 if "lora_A" in name else std)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
    return rank


def figures(rank: TrainerRank, versions: Sequence[int], quantization: BlockFp8 | None = None) -> list[float | None]:
    source = TrainerWeightSource(rank.decoder, 0, quantization)
    found = []
    for version in versions:
        source.begin(version)
        found.append(source.update_error())
        source.end()
    return found


def figure(rank: TrainerRank, quantization: BlockFp8 | None = None) -> float | None:
    """Of three versions."""
    found = [value for value in figures(rank, range(3), quantization) if value is not None]
    return sum(found) / 3 if len(found) == 3 else None


def whole_share(rank: TrainerRank) -> float:
    """1 - kept over all adapted matrices, from the definition, in float64."""
    source = TrainerWeightSource(rank.decoder, 0)
    source.begin(0)
    inner = square = 0.0
    for held in local_shards(rank.decoder):
        if not isinstance(held, HeldTensor) or held.delta is None:
            continue
        sent = torch.empty(held.region.shape, dtype=torch.bfloat16)
        source.read(held.tensor, held.region, sent)
        exact = torch.empty(held.region.shape)
        held.run(held.region).write(exact, {})
        update = exact.double() - held.base.double()
        inner += float((update * (sent.double() - held.base.double())).sum())
        square += float(update.square().sum())
    source.end()
    return abs(1.0 - inner / square)


@pytest.mark.parametrize(("std", "least", "most"), [(1e-5, 0.5, 1.0), (1e-2, 0.0, 0.05)])
def test_what_rounding_to_nearest_loses_is_told(std, least, most):
    rank = rank_with_updates_of(std, MergeRounding.nearest)
    found = figure(rank)
    assert found is not None and least <= found <= most
    assert found == pytest.approx(whole_share(rank), abs=0.15)


@pytest.mark.parametrize("quantization", [None, BlockFp8()])
def test_by_thresholds_engines_get_the_update(quantization):
    """Updates of about 4e-4, beside steps of 2^-11 (bfloat16) or up to 2^-7 (FP8). What is off is 10 times as large at
    most, with a mean of 0: 10 / sqrt(20,000)."""
    found = figure(rank_with_updates_of(1e-4, MergeRounding.dithered), quantization)
    assert found is not None and found < 0.1


def test_a_figure_is_of_its_version_alone():
    rank = rank_with_updates_of(1e-5, MergeRounding.nearest)
    assert figures(rank, [0, 1, 2])[2:] == figures(rank, [2])


def test_without_an_update_there_is_no_figure():
    assert figure(make_rank(dtype=DType.bfloat16)) is None
    assert figure(make_rank(dtype=DType.bfloat16, mode=TrainMode.full)) is None
    assert figure(make_rank(dtype=DType.bfloat16, hf_config=MOE)) is None


def test_weights_that_are_sent_without_their_update_are_told():
    """A fault: merged weights are written from the base alone."""
    rank = rank_with_updates_of(1e-2, MergeRounding.dithered)
    source = TrainerWeightSource(rank.decoder, 0)
    source._probe._added = lambda held, region: torch.zeros(region.shape)
    source.begin(0)
    assert source.update_error() == pytest.approx(1.0)
    source.end()
