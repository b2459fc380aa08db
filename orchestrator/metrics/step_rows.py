"""How a step's measurements become one row of metrics. Pure.

    StepRecord (what the parts of the run reported) --> row_of --> {name of the catalogue: number, or None}

Owns: the arithmetic, adding up over ranks included. Does not own: names and meanings (catalogue.py), the sums
that ranks return (trainer/step/), where a row goes (telemetry.py). Invariants: a row has every name of the catalogue,
None where the step has no such number; a name outside of it is refused.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.conf.json_files import JsonMapping
from slipstream.orchestrator.files.timeline import StepTimeline
from slipstream.orchestrator.metrics.catalogue import NO_EVALS, NO_REWARDS, RewardNames, Value, catalogue
from slipstream.orchestrator.metrics.held_out import EvalNames, Evaluation, is_informative
from slipstream.orchestrator.metrics.samples import TrainedRollout
from slipstream.rollout.agents.failures import FAILURES
from slipstream.rollout.agents.token_tree import REASONS
from slipstream.rollout.branches import branches_of
from slipstream.rollout.types import Group, Rollout
from slipstream.trainer.step.mismatch_bins import POSITION_STARTS, quantile
from slipstream.trainer.types import LossStats, OptimStats
from slipstream.weight_sync.publish.report import PublishReport

_TRAINING_S = ("trainer/forward_backward_s", "trainer/optimizer_s")


@dataclass(slots=True)
class StepRecord:
    """What happened in one step, as the parts of the run reported it. Unset parts become nulls in the row."""

    step: int
    policy_version: int
    groups: Sequence[Group] = ()
    staleness_steps: Sequence[int] = ()
    loss: Sequence[LossStats] = ()
    optim: OptimStats | None = None
    sync: PublishReport | None = None
    num_ranks: int = 1
    extra: dict[str, Value] = field(default_factory=dict[str, Value])
    """Single numbers by their catalogue name: seconds, counts."""
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    """Those that ended in this step; the row has the figures of the last one."""
    trained: Mapping[tuple[int, int], TrainedRollout] = field(default_factory=dict[tuple[int, int], TrainedRollout])
    """What the trainer made of those of `groups` that are shown (samples.shown_rollouts)."""
    timeline: StepTimeline | None = None


def row_of(record: StepRecord, rewards: RewardNames = NO_REWARDS, evals: EvalNames = NO_EVALS) -> dict[str, Value]:
    """One row: every name of the catalogue. How samples were split over ranks and microbatches makes no difference."""
    row: dict[str, Value] = dict.fromkeys(catalogue(rewards, evals))
    evaluated = record.evaluations[-1] if record.evaluations else None
    for part in (
        {"step": record.step, "policy_version": record.policy_version},
        _rollout_metrics(record),
        loss_metrics(record.loss) if record.loss else {},
        _sync_metrics(record.sync) if record.sync else {},
        evaluated.figures if evaluated is not None else {},
        _part_metrics(record.groups, rewards.all, "reward"),
        _part_metrics([] if evaluated is None else evaluated.all_groups, rewards.all, "eval"),
        record.extra,
    ):
        unknown = part.keys() - row.keys()
        if unknown:
            raise AssertionError(f"metrics outside of the catalogue: {sorted(unknown)}")
        row.update(part)
    k3, floor = row["parity/k3"], row["parity/floor_k3"]
    row["parity/k3_over_floor"] = k3 / floor if k3 is not None and floor else None
    if record.optim is not None:
        row["optim/grad_norm"], row["optim/lr"] = record.optim.grad_norm, record.optim.lr
        row["optim/skipped"] = int(not record.optim.is_finite)
    num_tokens, train_s = row["trainer/num_tokens"], sum(row[name] or 0 for name in _TRAINING_S)
    if num_tokens and train_s:
        row["trainer/tokens_per_s_per_rank"] = num_tokens / train_s / record.num_ranks
    return row


def failed_of(rows: Sequence[JsonMapping], area: str) -> str | None:
    """How many of the rollouts in these rows have no reward, for people: "3 of 64". None: all have one. `area`: reward,
    of batches; eval, of evaluations."""
    failed, num = (int(sum(row.get(name) or 0 for row in rows)) for name in failure_counts(area))
    if not failed:
        return None
    return f"{failed} of {num}" if num else str(failed)  # rows of another version do not say of how many


def failure_counts(area: str) -> tuple[str, str]:
    """The metrics of an area that `failed_of` reads: how many failed, and of how many."""
    return f"{area}/failures", f"{area}/rollouts"


def _known(rewards: Sequence[Sequence[float | None]]) -> list[float]:
    return [reward for group in rewards for reward in group if reward is not None]


def _rollout_metrics(record: StepRecord) -> dict[str, Value]:
    if not record.groups:
        return {}
    rollouts = [rollout for group in record.groups for rollout in group.rollouts]
    rewards = _known([group.rewards for group in record.groups])
    have_none = [not is_informative(group.rewards) for group in record.groups if len(group.rollouts) > 1]
    num_response_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    lengths = [
        len(branch.token_ids)
        for group in record.groups
        for rollout in group.rollouts
        for branch in branches_of(group.prompt, rollout)
    ]
    log_ratios = [
        own - teacher
        for rollout in rollouts
        if rollout.teacher_logprobs is not None
        for own, teacher in zip(rollout.logprobs, rollout.teacher_logprobs, strict=True)
    ]
    step_s = record.extra.get("step/total_s")
    return {
        "reward/mean": float(np.mean(rewards)) if rewards else None,
        "reward/std": float(np.std(rewards)) if rewards else None,
        "reward/failures": len(rollouts) - len(rewards),
        "reward/rollouts": len(rollouts),
        "reward/no_spread_fraction": float(np.mean(have_none)) if have_none else None,
        "distill/kl_mean": float(np.mean(log_ratios)) if log_ratios else None,
        "staleness/mean": float(np.mean(record.staleness_steps)),
        "staleness/max": max(record.staleness_steps),
        "rollout/tokens_per_s": num_response_tokens / step_s if step_s else None,
        "rollout/response_tokens_mean": num_response_tokens / len(rollouts),
        "rollout/truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        "rollout/evictions": sum(rollout.num_evictions for rollout in rollouts),
        **_route_metrics(rollouts, sum(lengths)),
        **_episode_metrics(rollouts, len(lengths)),
    }


def _episode_metrics(rollouts: Sequence[Rollout], num_branches: int) -> dict[str, Value]:
    seconds = [rollout.seconds for rollout in rollouts if rollout.seconds is not None]
    if not seconds:
        return {}
    reasons = Counter(turn.reason for rollout in rollouts for turn in rollout.turns)
    failures = Counter(rollout.failure for rollout in rollouts)
    return {
        "rollout/turns_mean": sum(len(rollout.turns) for rollout in rollouts) / len(rollouts),
        "rollout/branches_mean": num_branches / len(rollouts),
        **{f"rollout/branches_{reason}": reasons[reason] for reason in REASONS},
        "rollout/episode_s_mean": sum(seconds) / len(seconds),
        "rollout/episode_s_max": max(seconds),
        **{f"rollout/failed_{kind}": failures[kind] for kind in FAILURES},
    }


def _route_metrics(rollouts: Sequence[Rollout], num_tokens: int) -> dict[str, Value]:
    routes = [routes for rollout in rollouts for routes, _ in rollout.all_routes]
    if not routes:
        return {}
    return {
        "parity/tokens_without_route": sum(rollout.num_tokens_without_route for rollout in rollouts),
        "parity/route_bytes_per_token": sum(r.experts.nbytes + r.is_recorded.nbytes for r in routes) / num_tokens,
    }


def _sync_metrics(report: PublishReport) -> dict[str, Value]:
    seconds = ("pause_s", "begin_s", "idle_s", "mark_s", "prepare_s", "write_s", "verify_s", "commit_s", "total_s")
    others = ("peak_bytes", "watermark_bytes", "changed_fraction", "update_error", "relay_s", "relay_bytes")
    figures: dict[str, Value] = {f"sync/{name}": getattr(report, name) for name in (*seconds, *others)}
    return figures | {
        "sync/bytes": report.num_bytes,
        "sync/changed_params": report.num_changed_params,
        "sync/replicas_committed": report.num_committed,
        "sync/replicas_relayed": report.num_relayed,
    }


def _part_metrics(groups: Sequence[Group], names: Sequence[str], area: str) -> dict[str, Value]:
    """What each reward gave, and in training how often it failed. A row that it does not judge counts in neither."""
    metrics: dict[str, Value] = {}
    for name in names if groups else ():
        given = [parts[name] for group in groups for parts in group.parts if name in parts]
        known = [value for value in given if value is not None]
        metrics[f"{area}/{name}_mean"] = float(np.mean(known)) if known else None
        if area == "reward":
            metrics[f"reward/{name}_failures"] = len(given) - len(known)
    return metrics


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
