"""Promises of trainer/delivery/probes.py: the figure is the share of an engine's bits that a step changed."""

import pytest
import torch
from cases.rank_helpers import MOE_CONFIG, count, make_rank, make_samples
from cases.tiny_configs import GPT_OSS, MOE

from slipstream.conf.schema import DType, OptimConfig, TrainMode
from slipstream.trainer.delivery import probes
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.weights.quantization import BlockFp8


@pytest.fixture(autouse=True)
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
def test_the_figure_is_what_counting_every_element_gives(mode):
    """With adapters, half of all elements are never trained."""
    optim = OptimConfig(lr=1e-4 if mode == "full" else 1e-3)
    figure, counted = shares(
        make_rank(dtype=DType.bfloat16, mode=mode, optim=optim, hf_config={**MOE_CONFIG, "vocab_size": 500})
    )
    assert 0.005 < counted < 0.5, "some change, and some do not"
    assert figure == pytest.approx(counted, rel=0.25)


def test_it_is_counted_in_the_engines_format():
    """A code of block-FP8 changes more seldom than a bfloat16 value of the same step."""
    figures = {}
    for quantization in (None, BlockFp8()):
        rank = make_rank(dtype=DType.bfloat16, optim=OptimConfig(lr=1e-3))
        figure, counted = shares(rank, quantization)
        assert figure == pytest.approx(counted, rel=0.4)
        figures[quantization] = figure
    assert figures[BlockFp8()] < 0.5 * figures[None]


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
