"""Promises of trainer/rank.py: gradients do not depend on the layout or the split, and bad steps change nothing."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.rank_helpers import (
    SYNC_KEY,
    are_equal,
    count,
    fill_adapters,
    local_gradients,
    make_rank,
    make_samples,
    step,
    values_of,
)
from cases.tiny_configs import GEMMA4
from cases.tiny_models import logits_of
from fakes import publish
from fakes.memory_transport import MemoryFabric, MemoryTransport

from slipstream.conf.schema import AlgorithmConfig, Normalization, SyncMode, TrainMode, WeightSyncConfig
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.types import Denominators
from slipstream.weight_sync.pipeline.packing import Packet

KL = AlgorithmConfig(kl_coef=0.1, normalization=Normalization.sequence)


def train_once(rank: TrainerRank, assignment: list[list[int]]):
    """Gradients and stats of one batch, and the step's outcome."""
    samples = make_samples()
    stats = rank.forward_backward([[samples[i] for i in members] for members in assignment], count(samples))
    return stats, local_gradients(rank)


@pytest.mark.parametrize("mode", list(TrainMode))
def test_the_reference_is_the_policy_before_training(mode):
    """At the start policy and reference are equal: k3 is 0. After steps the penalty is positive, and it never
    moves a weight by itself.
    """
    rank = make_rank(mode=mode, algorithm=AlgorithmConfig(kl_coef=0.1))
    stats, _ = train_once(rank, [[0, 1], [2, 3, 4]])
    assert stats.sums["kl/ref_k3_sum"] == pytest.approx(0.0, abs=1e-5)
    rank.optimizer_step()
    before = values_of(rank)
    samples = make_samples(version=1)
    stats = rank.forward_backward([samples], count(samples, 1))
    assert stats.sums["kl/ref_k3_sum"] > 1e-3
    assert are_equal(before, values_of(rank))


def test_training_goes_on_from_an_adapter_and_its_penalty_pulls_back_to_it(tmp_path):
    first = make_rank()
    step(first)
    first.states.save_adapter(tmp_path)
    rank = make_rank(algorithm=AlgorithmConfig(kl_coef=0.1), init_from=tmp_path)
    assert are_equal(values_of(rank), values_of(first))
    stats, _ = train_once(rank, [[0, 1], [2, 3, 4]])
    assert stats.sums["kl/ref_k3_sum"] == pytest.approx(0.0, abs=1e-5)
    assert rank.optimizer_step().policy_version == 1
    samples = make_samples(version=1)
    assert rank.forward_backward([samples], count(samples, 1)).sums["kl/ref_k3_sum"] > 1e-3


def test_staleness_is_counted_from_the_version_that_is_trained():
    rank = make_rank()
    train_once(rank, [[0]])
    assert rank.optimizer_step().policy_version == rank.policy_version == 1
    samples = [*make_samples(1, version=1), *make_samples(2, version=0)[1:]]
    sums = rank.forward_backward([samples], count(samples, 1)).sums
    assert (sums["parity/num_tokens"], sums["parity/num_tokens_stale"]) == (1, 3)
    with pytest.raises(TrainerError, match="policy version 5 came to version 1"):
        rank.forward_backward([], replace(count(samples), policy_version=5))


def test_a_loss_that_is_not_finite_refuses_the_step_although_its_gradients_are(tmp_path):
    """One of somebody's own, whose sum overflows."""
    (tmp_path / "own.py").write_text("def far(tokens, algorithm):\n    return tokens.logprobs_N + 3e38\n")
    rank, samples = make_rank(algorithm=AlgorithmConfig(loss=f"{tmp_path / 'own.py'}:far")), make_samples()
    before = values_of(rank)
    rank.forward_backward([samples], count(samples[:1]))
    stats = rank.optimizer_step()
    assert np.isfinite(stats.grad_norm) and stats.grad_norm > 0
    assert (stats.is_finite, stats.policy_version) == (False, 0) and are_equal(before, values_of(rank))
    rank.forward_backward([], count([], 0))
    assert rank.optimizer_step().is_finite, "the next one is clean"


def test_several_updates_make_one_version_and_a_refused_one_changes_nothing():
    """Applied, refused, applied: one version. All refused: none."""
    rank, samples = make_rank(), make_samples()
    bad = [replace(samples[0], advantages=np.full_like(samples[0].advantages, np.inf))]
    versions = []
    for part, ends_version in ((samples, False), (bad, False), (samples, True), (bad, False), (bad, True)):
        rank.forward_backward([part], count(samples, rank.policy_version))
        versions.append(rank.optimizer_step(ends_version=ends_version).policy_version)
    assert versions == [0, 0, 1, 1, 1]
    rank.forward_backward([samples], count(samples, 1))
    rank.optimizer_step(ends_version=False)
    rank.forward_backward([bad], count(samples, 1))
    stats = rank.optimizer_step()  # refused, but the one before it changed the policy
    assert (stats.is_finite, stats.policy_version) == (False, 2)


def test_scores_are_the_policys_before_an_update_and_keep_the_ratio_at_one_until_then():
    """With them the first update is that of a step of one update; after it the ratio, its clip and the metrics of the
    mismatch go apart."""
    one, several = make_rank(algorithm=KL), make_rank(algorithm=KL)
    samples = make_samples()
    for rank in (one, several):
        fill_adapters(rank, 1)
    scores = [score for part in several.score([samples[:2], samples[2:], []], 0) for score in part]
    scored = [
        replace(sample, old_logprobs=spread(sample, score.logprobs), ref_logprobs=spread(sample, score.ref_logprobs))
        for sample, score in zip(samples, scores, strict=True)
    ]
    want = one.forward_backward([samples], count(samples)).sums
    got = several.forward_backward([scored], count(samples)).sums
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    want_gradients = local_gradients(one)
    for name, (_, gradient) in local_gradients(several).items():
        torch.testing.assert_close(gradient, want_gradients[name][1], rtol=1e-4, atol=1e-6)
    assert several.optimizer_step(ends_version=False).is_finite
    later = several.forward_backward([scored], count(samples)).sums
    assert later["parity/k3_sum"] == got["parity/k3_sum"]  # of the policy before the first update
    assert later["loss/policy_sum"] != pytest.approx(got["loss/policy_sum"], rel=1e-3)
    with pytest.raises(TrainerError, match="policy version 5 came to version 0"):
        several.score([samples], 5)


def spread(sample, values):
    """[T]: values of the tokens that count."""
    found = np.zeros(sample.num_tokens, np.float32)
    found[sample.loss_mask] = values
    return found


def test_values_of_tokens_that_do_not_count_are_never_read():
    """NaN in every uncounted entry of the float arrays leaves loss, stats and gradients as they were, to the bit."""
    results = []
    for garbage in (0.0, float("nan")):
        rank = make_rank()
        fill_adapters(rank, 1)
        samples = [
            replace(
                sample,
                rollout_logprobs=np.where(sample.loss_mask, sample.rollout_logprobs, garbage).astype(np.float32),
                advantages=np.where(sample.loss_mask, sample.advantages, garbage).astype(np.float32),
            )
            for sample in make_samples()
        ]
        stats = rank.forward_backward([samples], count(samples))
        results.append((stats.sums, {name: grad for name, (_, grad) in local_gradients(rank).items()}))
    (clean_sums, clean), (dirty_sums, dirty) = results
    assert clean_sums == dirty_sums
    assert all(torch.equal(grad, dirty[name]) for name, grad in clean.items())


def test_scores_are_log_probabilities_at_the_temperature_of_sampling():
    """The model bounds its logits, and scores follow."""
    rank, sample = make_rank(hf_config={**GEMMA4, "final_logit_softcapping": 1.0}), make_samples(3)[2]
    ((score,),) = rank.score([[sample]], 0)
    tokens = torch.from_numpy(sample.token_ids).long()
    logits = logits_of(rank.decoder, (tokens, torch.arange(len(tokens)), torch.tensor([0, len(tokens)])))
    wanted = (logits / 0.9).log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    np.testing.assert_allclose(score.logprobs, wanted.detach()[sample.loss_mask[1:]], rtol=1e-4)


def test_log_probabilities_of_the_samples_that_are_shown_are_told():
    rank = make_rank()
    fill_adapters(rank, 1)
    samples = [replace(sample, origin=(i, 0, 0), is_shown=i != 1) for i, sample in enumerate(make_samples())]
    batch = [[samples[1], samples[0]], samples[2:]]
    scores = [score.logprobs for part in rank.score(batch, 0) for score in part]
    found = rank.forward_backward(batch, count(samples)).logprobs
    assert found.keys() == {sample.origin for sample in samples if sample.is_shown}
    for sample, logprobs in zip(batch[0] + batch[1], scores, strict=True):
        assert not sample.is_shown or np.array_equal(found[sample.origin], logprobs)


def test_a_batch_without_a_sample_changes_no_weight():
    """Every reward of a batch may fail: the ranks get no microbatch, and the step is one of zero gradient."""
    rank = make_rank()
    before = values_of(rank)
    stats = rank.forward_backward([], Denominators(num_valid_tokens=0, num_sequences=0, policy_version=0))
    result = rank.optimizer_step()
    assert stats.sums == {}
    assert (result.is_finite, result.grad_norm, result.policy_version) == (True, 0.0, 1)
    assert are_equal(before, values_of(rank))


def test_peak_memory_is_the_steps_own(monkeypatch):
    """A GPU's counter holds the largest value since it was reset: 9 bytes of loading must not show in the step's 4."""
    rank, held = make_rank(), [9]
    assert "memory/peak_device_bytes" not in rank.forward_backward([], count([])).maxima
    rank._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: held.__setitem__(slice(None), [4]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: max(held))
    assert rank.forward_backward([], count([])).maxima == {"memory/peak_device_bytes": 4.0}


def test_calls_out_of_order_are_refused():
    rank = make_rank()
    with pytest.raises(TrainerError, match="before connect"):
        rank.delivery.publish(rank.policy_version)
    with pytest.raises(TrainerError, match=r"call load\(\) first"):
        make_rank(is_loaded=False).optimizer_step()


class CountingTransport(MemoryTransport):
    """Knows how many tensors were registered at once, at the most."""

    most = 0

    def register(self, tensors):
        super().register(tensors)
        self.most = max(self.most, len(self._held))


def is_a_packet_collected() -> bool:
    return any(isinstance(one, Packet) for one in gc.get_objects())


def test_a_base_that_is_sent_again_has_the_watermark_for_itself():
    """Real publishers over the memory link, of small tensors: a base and adapters that differ in nothing else."""
    fabric = MemoryFabric()
    transport = CountingTransport(fabric)
    sync = WeightSyncConfig(mode=SyncMode.adapter, watermark_bytes=1 << 16)
    rank = make_rank(weight_sync=sync)
    delivery = rank.delivery
    delivery.source, delivery.base_source = (publish.DictSource(0, num_ranks=1) for _ in range(2))  # type: ignore[assignment]
    engines = [publish.PlainEngine([MemoryTransport(fabric) for _ in range(2)]) for _ in range(2)]
    endpoints = [publish.EndpointThread(engine, SYNC_KEY) for engine in engines]
    base, slots = (endpoint.address for endpoint in endpoints)
    try:
        rank.delivery.connect([base], transport, [slots])
        assert not is_a_packet_collected(), "the plan is frozen"
        gc.unfreeze()
        assert is_a_packet_collected()
        assert rank.delivery.publish(rank.policy_version).num_committed == 1
        rank.delivery.reconnect(0, slots, base)
        assert rank.delivery.publish(2).num_committed == 1
        assert [engine.wrong_params(version) for engine, version in zip(engines, (0, 2), strict=True)] == [[], []]
    finally:
        rank.shutdown()
        for endpoint in endpoints:
            endpoint.close()
    assert transport.most == 1, "staging of one publisher at a time"
