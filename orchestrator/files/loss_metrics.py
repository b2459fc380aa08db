"""What ranks measured in forward and backward, as metrics of a row.

Owns: adding up over ranks, and the division after it. Does not own: the sums (trainer/step/), the catalogue of metrics
and rows (telemetry.py).
"""

import math
from collections.abc import Mapping, Sequence

from slipstream.orchestrator.files.metrics_catalogue import Value
from slipstream.trainer.step.mismatch_bins import POSITION_STARTS, quantile
from slipstream.trainer.types import LossStats


def loss_metrics(stats: Sequence[LossStats]) -> dict[str, Value]:
    """Add the ranks' sums, then divide once: the mean over tokens of the batch, whatever the layout."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    vectors: dict[str, list[float]] = {}
    for rank in stats:
        for name, value in rank.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in rank.maxima.items():
            maxima[name] = max(maxima.get(name, -math.inf), value)
        for name, values in rank.vectors.items():
            known = vectors.get(name, [0.0] * len(values))
            vectors[name] = [one + other for one, other in zip(known, values, strict=True)]

    def mean(name: str, count: str = "policy/num_tokens") -> Value:
        return sums[name] / sums[count] if sums.get(count) else None

    if not sums.get("policy/num_tokens"):
        return {}  # no response of the batch had a reward: there is no token to speak of
    common: dict[str, Value] = {
        "loss/total": sums["loss/total_sum"],  # already divided by the batch's denominators
        "policy/entropy": mean("policy/entropy_sum"),
        "trainer/peak_device_bytes": maxima.get("memory/peak_device_bytes"),
    }
    if "sft/nll_sum" in sums:
        return {**common, "sft/nll": mean("sft/nll_sum")}
    if "dpo/num_pairs" in sums:
        return {
            **common,
            "dpo/loss": mean("dpo/loss_sum", "dpo/num_pairs"),
            "dpo/accuracy": mean("dpo/num_preferred", "dpo/num_pairs"),
            "dpo/margin_mean": mean("dpo/margin_sum", "dpo/num_pairs"),
            "dpo/chosen_reward": mean("dpo/chosen_reward_sum", "dpo/num_pairs"),
            "dpo/rejected_reward": mean("dpo/rejected_reward_sum", "dpo/num_pairs"),
        }
    clipped = sums["policy/num_clipped_low"] + sums["policy/num_clipped_high"]
    return {
        **_parity_metrics(sums, maxima, vectors),
        "parity/flipped_routings": mean("parity/num_flipped", "parity/num_routings"),
        **common,
        "loss/policy": sums["loss/policy_sum"],
        "loss/kl": mean("kl/ref_k3_sum"),
        "loss/clip_fraction": clipped / sums["policy/num_tokens"],
        "loss/ratio_mean": mean("policy/ratio_sum"),
        "correction/weight_mean": mean("correction/weight_sum"),
        "correction/ess_fraction": _effective_share(sums),
        "correction/truncated_fraction": mean("correction/num_truncated"),
        "correction/masked_fraction": mean("correction/num_masked"),
        "correction/truncated_sequence_fraction": mean("correction/num_truncated_sequences", "policy/num_sequences"),
        "correction/masked_sequence_fraction": mean("correction/num_masked_sequences", "policy/num_sequences"),
    }


def _parity_metrics(
    sums: Mapping[str, float], maxima: Mapping[str, float], vectors: Mapping[str, Sequence[float]]
) -> dict[str, Value]:
    """Figures of the tokens at staleness 0, and of the others; null if there are none."""
    row: dict[str, Value] = {}
    for suffix in ("", "_stale"):
        num_tokens = sums[f"parity/num_tokens{suffix}"]
        row[f"parity/num_tokens{suffix}"] = num_tokens
        if num_tokens:
            row[f"parity/k3{suffix}"] = sums[f"parity/k3_sum{suffix}"] / num_tokens
            row[f"parity/prob_diff{suffix}"] = sums[f"parity/prob_diff_sum{suffix}"] / num_tokens
            row[f"parity/k3_p99{suffix}"] = quantile(vectors[f"parity/k3_histogram{suffix}"], 0.99)
            for name in ("k3_max", "prob_diff_max", "log_ratio_max"):
                row[f"parity/{name}{suffix}"] = maxima[f"parity/{name}{suffix}"]
    by_position = zip(
        POSITION_STARTS, vectors["parity/k3_by_position"], vectors["parity/num_tokens_by_position"], strict=True
    )
    return row | {f"parity/k3_from_{start}": total / count for start, total, count in by_position if count}


def _effective_share(sums: Mapping[str, float]) -> Value:
    """(sum w)^2 / (n * sum w^2) (Kish 1965); null when all weights are 0."""
    squares = sums["correction/weight_square_sum"] * sums["policy/num_tokens"]
    return sums["correction/weight_sum"] ** 2 / squares if squares else None
