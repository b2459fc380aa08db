"""Promises of trainer/delivery/probes.py: the share of an engine's bits that a step changed, and of an update that it
lacks."""

from collections.abc import Sequence

import pytest
import torch
from cases.rank_helpers import MOE_CONFIG, count, make_rank, make_samples
from cases.tiny_configs import GPT_OSS, MOE

from slipstream.conf.schema import DType, MergeRounding, OptimConfig, TrainMode, WeightSyncConfig
from slipstream.trainer.delivery import probes
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.weights.quantization import BlockFp8
from slipstream.trainer.weights.shards import HeldTensor, local_shards


@pytest.fixture
def many_rows(monkeypatch):
    """Tiny matrices have few rows; look at many of them, so that the sample's error is small."""
    monkeypatch.setattr(probes, "PLACES", 400)
    monkeypatch.setattr(probes, "PLACE_ELEMENTS", 64)


def everything(source: TrainerWeightSource) -> dict[str, torch.Tensor]:
    """The bits of all that engines get."""
    dtypes = {meta.name: getattr(torch, meta.dtype) for meta in source.layout().tensors}
    found = {}
    for shard in source.layout().shards:
        if not shard.tensor.endswith("_scale_inv"):
            out = torch.empty(shard.region.shape, dtype=dtypes[shard.tensor])
            source.read(shard.tensor, shard.region, out)
            found[shard.tensor] = out.view(torch.uint8).view(*out.shape, -1)
    return found


def step(rank: TrainerRank) -> None:
    version = rank.policy_version
    rank.forward_backward([make_samples(version=version)], count(make_samples(version=version), version))
    assert rank.optimizer_step().is_finite


def shares(rank: TrainerRank, quantization: BlockFp8 | None = None) -> tuple[float, float]:
    """(the figure, counted over every element) of the third version beside the second."""
    source = TrainerWeightSource(rank.decoder, 0, quantization)
    read = []
    for version in range(3):
        source.begin(version)
        read.append(everything(source))
        figure = source.changed_fraction()
        source.end()
        assert (figure is None) == (version == 0)
        if version < 2:
            step(rank)
    changed = sum(int((read[2][name] != was).any(-1).sum()) for name, was in read[1].items())
    assert figure is not None
    return figure, changed / sum(was[..., 0].numel() for was in read[1].values())


@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
@pytest.mark.usefixtures("many_rows")
def test_the_figure_is_what_counting_every_element_gives(mode):
    """With adapters, half of all elements are never trained."""
    optim = OptimConfig(lr=1e-4 if mode == "full" else 1e-3)
    figure, counted = shares(
        make_rank(dtype=DType.bfloat16, mode=mode, optim=optim, hf_config={**MOE_CONFIG, "vocab_size": 500})
    )
    assert 0.005 < counted < 0.5, "some change, and some do not"
    assert figure == pytest.approx(counted, rel=0.25)


@pytest.mark.usefixtures("many_rows")
def test_it_is_counted_in_the_engines_format():
    """A code of block-FP8 changes more seldom than a bfloat16 value of the same step."""
    figures = {}
    for quantization in (None, BlockFp8()):
        rank = make_rank(dtype=DType.bfloat16, optim=OptimConfig(lr=1e-3))
        figure, counted = shares(rank, quantization)
        assert figure == pytest.approx(counted, rel=0.4)
        figures[quantization] = figure
    assert figures[BlockFp8()] < 0.5 * figures[None]


@pytest.mark.usefixtures("many_rows")
def test_fused_experts_are_looked_at():
    figure, counted = shares(make_rank(dtype=DType.bfloat16, hf_config=GPT_OSS, optim=OptimConfig(lr=1e-3)))
    assert figure == pytest.approx(counted, rel=0.3)


def test_a_later_round_of_a_publish_changes_nothing_and_no_step_is_no_change():
    rank = make_rank(dtype=DType.bfloat16)
    source = TrainerWeightSource(rank.decoder, 0)
    figures = []
    for version, does_step in ((0, True), (1, False), (1, False), (2, False)):
        source.begin(version)
        figures.append(source.changed_fraction())
        source.end()
        if does_step:
            step(rank)
    assert figures[0] is None and figures[1] and figures[1] == figures[2] and figures[3] == 0.0


def test_what_is_never_trained_has_no_figure():
    """The base that adapter mode sends once."""
    source = TrainerWeightSource(make_rank(hf_config=MOE).decoder, 0, is_merged=False)
    for version in range(2):
        source.begin(version)
        assert source.changed_fraction() is None
        source.end()


# --- the share of an update that engines' weights lack ---


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
    """The one figure that three versions give."""
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
