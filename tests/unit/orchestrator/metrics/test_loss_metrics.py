"""Locks: figures of a loss are those of all tokens, sequences or pairs, however ranks shared them."""

import pytest
from fakes.trainer import stats

from slipstream.orchestrator.metrics.catalogue import METRICS
from slipstream.orchestrator.metrics.step_rows import loss_metrics
from slipstream.trainer.types import LossStats


def test_means_do_not_depend_on_how_samples_were_split_over_ranks() -> None:
    whole = loss_metrics([stats(8, 0.5, num_stale=2)])
    split = loss_metrics([stats(4, 0.5, num_stale=0), stats(4, 0.5, num_stale=2), stats(0, 0.0)])
    assert split == pytest.approx(whole)
    assert whole["parity/k3_stale"] == pytest.approx(5.0)


def test_weights_are_averaged_over_tokens_and_memory_is_the_fullest_ranks() -> None:
    first, second = stats(4, 0.5), stats(2, 0.2)
    first.sums["correction/weight_sum"], second.sums["correction/weight_sum"] = 5.0, 1.0
    metrics = loss_metrics([first, second])
    assert metrics["correction/weight_mean"] == pytest.approx(6 / 6)
    assert metrics["trainer/peak_device_bytes"] is None  # on CPUs
    for rank, num_bytes in ((first, 7e9), (second, 9e9)):
        rank.maxima["memory/peak_device_bytes"] = num_bytes
        rank.sums["correction/weight_sum"] *= 2
    metrics = loss_metrics([first, second])
    assert (metrics["correction/weight_mean"], metrics["trainer/peak_device_bytes"]) == (pytest.approx(2.0), 9e9)
    for rank in (first, second):
        rank.sums["sft/nll_sum"] = 1.0
    assert loss_metrics([first, second])["trainer/peak_device_bytes"] == 9e9


def test_figures_of_pairs_are_means_over_the_pairs_of_all_ranks() -> None:
    names = ("loss_sum", "num_preferred", "margin_sum", "chosen_reward_sum", "rejected_reward_sum")
    ranks = [
        LossStats({"loss/total_sum": 0.2, "policy/num_tokens": 9.0, "policy/entropy_sum": 1.0, "dpo/num_pairs": count}
                  | {f"dpo/{name}": value for name, value in zip(names, values, strict=True)}, {})
        for count, values in ((3.0, (1.5, 2.0, 0.9, 0.6, -0.3)), (1.0, (0.5, 1.0, 0.3, 0.4, 0.1)))
    ]  # fmt: skip
    row = {name: value for name, value in loss_metrics(ranks).items() if name.startswith("dpo/")}
    wanted = {"loss": 0.5, "accuracy": 0.75, "margin_mean": 0.3, "chosen_reward": 0.25, "rejected_reward": -0.05}
    assert row == pytest.approx({f"dpo/{name}": value for name, value in wanted.items()})
    assert row.keys() <= METRICS.keys()


def test_parity_figures_of_ranks_are_those_of_all_their_tokens() -> None:
    """200 tokens on two ranks, 198 with a k3 of 1e-6 in a bin that ends at 1e-6 * 10 ** (1 / 16), one of 1e-2, one of
    4e-2: 99 % of 200 are those 198. Of two positions' ranges one has 150 tokens."""
    ranks = [stats(100, 0.0), stats(100, 0.0)]
    small, large = (round(16 * (16 + exponent)) for exponent in (-6, -2))
    for rank, counts in zip(ranks, ({small: 100}, {small: 98, large: 1, large + 9: 1}), strict=True):
        for index, count in counts.items():
            rank.vectors["parity/k3_histogram"][index] = count
        rank.vectors["parity/k3_by_position"][:2] = [0.3, 0.5]
        rank.vectors["parity/num_tokens_by_position"][:2] = [75, 25]
        rank.maxima["parity/k3_max"] = 4e-2 if large in counts else 1e-6
    row = loss_metrics(ranks)
    assert row["parity/k3_p99"] == pytest.approx(1e-6 * 10 ** (1 / 16))
    assert row["parity/k3_max"] == 4e-2
    assert row["parity/k3_from_0"] == pytest.approx(0.6 / 150)
    assert row["parity/k3_from_16"] == pytest.approx(1.0 / 50)
    assert "parity/k3_from_64" not in row and "parity/k3_p99_stale" not in row


def test_every_figure_of_a_loss_is_by_tokens_or_by_sequences_of_all_ranks() -> None:
    """8 and 2 tokens, of which 1 and 1 are stale, in 5 sequences."""
    names = {
        "loss/total_sum": (0.25, 0.5, 0.75),
        "loss/policy_sum": (1.0, 2.5, 3.5),
        "kl/ref_k3_sum": (1.0, 2.0, 0.3),
        "policy/ratio_sum": (7.0, 2.0, 0.9),
        "correction/num_truncated": (3.0, 1.0, 0.4),
        "correction/num_masked": (1.0, 0.0, 0.1),
        "correction/num_truncated_sequences": (1.0, 1.0, 0.4),
        "correction/num_masked_sequences": (3.0, 0.0, 0.6),
        "parity/prob_diff_sum": (0.75, 0.25, 1 / 8),
        "parity/prob_diff_sum_stale": (0.5, 0.25, 0.75 / 2),
    }
    ranks = [stats(8, 0.0, num_stale=1), stats(2, 0.0, num_stale=1)]
    for rank, which in zip(ranks, (0, 1), strict=True):
        rank.sums.update({name: values[which] for name, values in names.items()})
    ranks[0].sums.update({"policy/num_clipped_low": 1.0, "policy/num_clipped_high": 2.0})
    most = {"k3_max": 1.0, "prob_diff_max": 2.0, "log_ratio_max": 3.0}
    ranks[0].maxima.update({f"parity/{name}_stale": value for name, value in most.items()})
    row = loss_metrics(ranks)
    shown = {
        "loss/total": "loss/total_sum",
        "loss/policy": "loss/policy_sum",
        "loss/kl": "kl/ref_k3_sum",
        "loss/ratio_mean": "policy/ratio_sum",
        "parity/prob_diff": "parity/prob_diff_sum",
        "parity/prob_diff_stale": "parity/prob_diff_sum_stale",
        **{
            f"correction/{what}{of}_fraction": f"correction/num_{what}{of and '_sequences'}"
            for what in ("truncated", "masked")
            for of in ("", "_sequence")
        },
    }
    assert {name: row[name] for name in shown} == pytest.approx({name: names[of][2] for name, of in shown.items()})
    assert row["loss/clip_fraction"] == pytest.approx(0.3)
    assert {name: row[f"parity/{name}_stale"] for name in most} == most


def test_effective_share_is_that_of_kish() -> None:
    """Weights 1, 1 and 0 of three tokens: (1 + 1)^2 / (3 * 2) = 2/3."""
    rank = stats(3, 0.0)
    rank.sums.update({"correction/weight_sum": 2.0, "correction/weight_square_sum": 2.0, "correction/num_masked": 1.0})
    row = loss_metrics([rank])
    assert row["correction/ess_fraction"] == pytest.approx(2 / 3)
    assert row["correction/masked_fraction"] == pytest.approx(1 / 3)
