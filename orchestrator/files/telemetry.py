"""The one place that emits metrics, progress and samples. Every other part of a run returns measurements.

    StepRecord --> row_of --> metrics.jsonl      one row per step; step 0 is the state before training
                        |---> tensorboard/       the same numbers (written without torch)
                        |---> Ray gauges         ray_slipstream_<area>_<name>, on the dashboard's Prometheus endpoint
                        +---> one progress line  with the time left

Owns: the catalogue of metrics (`METRICS`, `REWARD_METRICS` and `JUDGE_METRICS`: name -> meaning), how a step's
measurements become one row, and where rows go. Does not own: the format of events and gauges (metric_sinks), of the log
(run_log), the picture at the end (curves).
Invariants: a row has every name of the catalogue, null where the step has no such number; a name outside of it cannot
be emitted; rows are in step order, one each. Tests and plots read metrics.jsonl, never stdout.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from orchestrator.files.disk_space import naming_a_full_disk
from orchestrator.files.loss_metrics import loss_metrics
from orchestrator.files.metric_sinks import RayGauges, TensorBoardEvents, Value
from orchestrator.files.run_folder import RunFolder
from orchestrator.files.run_log import ProgressLine
from rollout.agents.failures import FAILURES
from rollout.agents.token_tree import REASONS
from rollout.branches import branches_of
from rollout.types import Group, Rollout
from trainer.types import LossStats, OptimStats

if TYPE_CHECKING:
    from weight_sync.publish.report import PublishReport

logger = logging.getLogger(__name__)

METRICS: dict[str, str] = {
    "step": "optimizer steps done",
    "policy_version": "version that the step produced",
    "reward/mean": "mean reward of the batch's rollouts",
    "reward/std": "standard deviation of the same",
    "reward/failures": "rollouts whose reward raised or timed out; they are left out",
    "eval/reward": "mean reward on held-out prompts, under policy_version",
    "eval/failures": "held-out rollouts whose reward raised or timed out",
    "eval/total_s": "seconds of the evaluation",
    "sync/total_s": "seconds of the whole publish",
    "sync/publish_s": "the same number, under a second name",
    "sync/pause_s": "longest time in which a replica decoded nothing",
    "sync/begin_s": "pause engines, mark them dirty, collect their answers",
    "sync/idle_s": "part of begin_s: until the slowest engine stood still, its step in flight included",
    "sync/mark_s": "part of begin_s: from then until the ranks of all engines were marked dirty",
    "sync/prepare_s": "merge, cast and pack, on the slowest rank; overlaps with write_s",
    "sync/write_s": "one-sided writes, on the slowest rank",
    "sync/verify_s": "hashes compared at the receivers",
    "sync/wave_s": "longest wave of the publish (weight_sync.publish_waves); total_s when there is one",
    "sync/commit_s": "repack, recompute, adopt the version, resume",
    "sync/bytes": "bytes written over the link, all ranks",
    "sync/peak_bytes": "most temporary device memory on one rank",
    "sync/watermark_bytes": "the declared bound on it",
    "sync/changed_params": "engine parameters whose bytes differ from the last publish's; null at the first one",
    "sync/replicas_committed": "replicas that adopted the version",
    "sync/replicas_relayed": "replicas among them that read it from another one of their node (weight_sync.relay)",
    "sync/relay_s": "part of total_s: those reads",
    "sync/relay_bytes": "bytes of those reads; not in sync/bytes",
    "parity/k3": "mismatch KL(rollout || trainer) of tokens at staleness 0: numerics alone",
    "parity/k3_p99": "99 % of those tokens have a k3 below it; read from bins, so up to 15.5 % too large",
    "parity/k3_max": "largest k3 of one of those tokens",
    "parity/prob_diff": "mean |trainer - rollout probability| of those tokens",
    "parity/prob_diff_max": "largest of the same",
    "parity/log_ratio_max": "largest |trainer - rollout log-probability| of the same",
    "parity/num_tokens": "tokens behind these figures",
    "parity/floor_k3": "k3 between an engine's decoding and its own prefill of some of those tokens",
    "parity/floor_log_ratio_max": "largest |prefill - decoding log-probability| of the same",
    "parity/k3_over_floor": "parity/k3 over parity/floor_k3",
    "parity/k3_stale": "parity/k3 of tokens of older versions: numerics and drift",
    "parity/k3_p99_stale": "parity/k3_p99 of those",
    "parity/k3_max_stale": "parity/k3_max of those",
    "parity/prob_diff_stale": "parity/prob_diff of those",
    "parity/prob_diff_max_stale": "parity/prob_diff_max of those",
    "parity/log_ratio_max_stale": "parity/log_ratio_max of those",
    "parity/num_tokens_stale": "tokens behind these figures",
    "parity/k3_from_0": "parity/k3 of the tokens 0 to 15 of their responses",
    "parity/k3_from_16": "parity/k3 of the tokens 16 to 63",
    "parity/k3_from_64": "parity/k3 of the tokens 64 to 255",
    "parity/k3_from_256": "parity/k3 of the tokens 256 to 1023",
    "parity/k3_from_1024": "parity/k3 of the tokens 1024 to 4095",
    "parity/k3_from_4096": "parity/k3 of the tokens 4096 to 16383",
    "parity/k3_from_16384": "parity/k3 of the tokens from 16384 on",
    "parity/flipped_routings": "share of the replayed choices of experts that the trainer would not have made",
    "parity/tokens_without_route": "response tokens outside of the loss because their route is missing",
    "parity/route_bytes_per_token": "bytes of recorded routes (parity.replay_routing), per prompt and response token",
    "policy/entropy": "mean entropy of the policy, in nats per token",
    "loss/total": "loss that was differentiated",
    "loss/policy": "its policy term",
    "loss/kl": "mean k3 to the reference policy per token, whatever the normalization (0 when kl_coef=0)",
    "loss/clip_fraction": "tokens whose ratio was clipped",
    "loss/ratio_mean": "mean exp(trainer - rollout log-probability)",
    "correction/weight_mean": "mean importance weight of the tokens; 1 with algorithm.correction=none",
    "correction/ess_fraction": "effective sample size of those weights over the number of tokens; 1 when all are equal",
    "correction/truncated_fraction": "tokens whose weight was cut to algorithm.correction_max",
    "correction/masked_fraction": "tokens left out by algorithm.correction or parity.mask_log_ratio",
    "correction/truncated_sequence_fraction": "responses with a token whose weight was cut",
    "correction/masked_sequence_fraction": "responses with a token that was left out",
    "sft/nll": "algorithm=sft: mean negative log-likelihood of the taught tokens, in nats",
    "sft/epoch": "algorithm=sft: passes over data.path that are complete",
    "eval/nll": "algorithm=sft: the same mean over the held-out conversations, under policy_version",
    "optim/grad_norm": "global gradient norm before clipping",
    "optim/lr": "learning rate of the step",
    "optim/skipped": "1 when loss or norm was not finite: nothing updated, nothing published",
    "staleness/mean": "mean over groups, in steps, at consumption",
    "staleness/max": "largest of the same",
    "staleness/dropped_groups": "groups that were too old at consumption and sampled again",
    "rollout/wait_s": "seconds the trainer waited for this batch",
    "rollout/tokens_per_s": "response tokens of the batch over seconds of the step",
    "rollout/response_tokens_mean": "mean response length",
    "rollout/truncated_fraction": "responses that ended by length",
    "rollout/turns_mean": "rollout.agent: mean turns of an episode",
    "rollout/branches_mean": "rollout.agent: mean sequences that the trainer makes of an episode",
    **{f"rollout/branches_{reason}": f"rollout.agent: branches because {why}" for reason, why in REASONS.items()},
    "rollout/episode_s_mean": "rollout.agent: mean seconds of an episode",
    "rollout/episode_s_max": "rollout.agent: the longest of them",
    **{f"rollout/failed_{kind}": f"rollout.agent: {what}; they are left out" for kind, what in FAILURES.items()},
    "rollout/evictions": "requests of these responses that a publish ended for their slot (weight_sync.on_busy_slot)",
    "rollout/groups_failed": "groups sampled again since the last step because their worker failed",
    "rollout/groups_uninformative": "groups replaced since the last step because their rewards were all equal",
    "rollout/replicas_serving": "replicas in service",
    "rollout/restarts": "rollout workers started again since the last step",
    "rollout/recoveries": "rollout workers that came back into service since the last step",
    "rollout/down_s": "longest time that one of those was out of service",
    "rollout/recovery_read_s": "seconds it read its weights from a peer; null when a publish brought them",
    "data/epoch": "passes over the training prompts that are complete; of several sources, of the slowest",
    "data/share_error": "largest difference between a source's share of the prompts and its weight (data.sources)",
    "data/seen_fraction": "data.curriculum=middling: prompts that were sampled at least once",
    "data/success_rate": "data.curriculum=middling: mean success rate of those, newer groups counting more",
    "data/middling_fraction": "data.curriculum=middling: those among them that are neither always nor never solved",
    "trainer/forward_backward_s": "seconds of forward and backward, slowest rank",
    "trainer/optimizer_s": "seconds of the optimizer step",
    "trainer/tokens_per_s_per_rank": "prompt and response tokens over those seconds and ranks",
    "trainer/num_microbatches": "microbatches of one rank",
    "trainer/peak_device_bytes": "most GPU memory of one rank in forward and backward; null on CPUs",
    "step/total_s": "seconds of the step, waits included",
}

REWARD_METRICS: dict[str, str] = {
    "reward/<name>_mean": "mean of what one reward gave to the batch's rollouts, before its weight",
    "reward/<name>_failures": "rollouts for which that reward raised or timed out",
    "eval/<name>_mean": "mean of what that reward gave to held-out rollouts",
}
"""Metrics of every reward of a run; <name> is its name in reward.parts, or its kind."""

JUDGE_METRICS: dict[str, str] = {
    "reward/<name>_requests": "requests that a judge was sent since the last step",
    "reward/<name>_retries": "requests among them that repeated one that failed",
    "reward/<name>_cached": "verdicts that the judge's cache gave since the last step",
    "reward/<name>_prompt_tokens": "tokens that the judge read since the last step, by its own count",
    "reward/<name>_completion_tokens": "tokens that it wrote",
}
"""Metrics of every reward that is a judge, in addition."""


@dataclass(frozen=True, slots=True)
class RewardNames:
    """A run's rewards, each of which has metrics of its own. Example: RewardNames(("right", "style"), ("style",))."""

    all: Sequence[str] = ()
    """Rewards, and what the length of a response adds to them."""
    judges: Sequence[str] = ()
    """Rewards among them that ask another model."""


NO_REWARDS = RewardNames()


def catalogue(rewards: RewardNames) -> dict[str, str]:
    """Name -> meaning of every metric of a run with these rewards."""
    found = dict(METRICS)
    for names, metrics in ((rewards.all, REWARD_METRICS), (rewards.judges, JUDGE_METRICS)):
        found |= {metric.replace("<name>", name): meaning for name in names for metric, meaning in metrics.items()}
    return found


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
    eval_groups: Sequence[Group] = ()
    num_ranks: int = 1
    extra: dict[str, Value] = field(default_factory=dict[str, Value])
    """Single numbers by their catalogue name: seconds, counts."""
    shows_groups: bool = False
    """Whether some of `groups` go to samples.jsonl, as some of `eval_groups` always do."""


def row_of(record: StepRecord, rewards: RewardNames = NO_REWARDS) -> dict[str, Value]:
    """One row: every name of the catalogue. How samples were split over ranks and microbatches makes no difference."""
    row: dict[str, Value] = dict.fromkeys(catalogue(rewards))
    for part in (
        {"step": record.step, "policy_version": record.policy_version},
        _rollout_metrics(record),
        loss_metrics(record.loss) if record.loss else {},
        _sync_metrics(record.sync) if record.sync else {},
        _eval_metrics(record.eval_groups) if record.eval_groups else {},
        _part_metrics(record.groups, rewards.all, "reward"),
        _part_metrics(record.eval_groups, rewards.all, "eval"),
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
    return row


class Telemetry:
    """Sinks of one run. Use as a context manager; `step` writes and shows one row.

    Args:
        folder: the run folder.
        num_steps: steps of the whole run, for the time left.
        first_step: what was emitted after this step is removed: it belongs to work that a resumed run redoes.
        progress: the line on the terminal.
        rewards: names of the run's rewards.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        num_steps: int,
        first_step: int,
        tensorboard: bool,
        progress: ProgressLine,
        rewards: RewardNames = NO_REWARDS,
    ) -> None:
        self._folder = folder
        self._rewards = rewards
        self._num_steps = num_steps
        self._progress = progress
        truncate_rows(folder.metrics, after_step=first_step)
        truncate_rows(folder.samples, after_step=first_step)
        self._file: TextIO = folder.metrics.open("a")
        self._samples: TextIO = folder.samples.open("a")
        self._events = TensorBoardEvents(folder.tensorboard, after_step=first_step) if tensorboard else None
        self._gauges = RayGauges(catalogue(rewards))
        self._recent_s: deque[float] | None = None
        self.last_eval_reward: Value = None

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in (self._file, self._samples, self._events):
            if sink is not None:
                with suppress(OSError):  # what a full disk left in a buffer: the run has said why it ends
                    sink.close()

    def step(self, record: StepRecord) -> dict[str, Value]:
        """Emit one row everywhere and return it."""
        row = row_of(record, self._rewards)
        with naming_a_full_disk(self._folder.metrics):
            self._file.write(json.dumps({name: _finite(value) for name, value in row.items()}) + "\n")
            self._file.flush()
        if self._events:
            with naming_a_full_disk(self._folder.tensorboard):
                self._events.write(record.step, row)
        self._gauges.set(row)
        if record.eval_groups:
            self.last_eval_reward = row["eval/reward"]
        with naming_a_full_disk(self._folder.samples):
            self._write_samples(record)
        seconds = row["step/total_s"]
        if record.optim is not None and seconds is not None:
            if self._recent_s is None:
                self._recent_s = deque(maxlen=20)  # without the first step, which compiles kernels
            else:
                self._recent_s.append(float(seconds))
        self._progress.show(record.step, self._num_steps, self._describe(row), self._left_s(record.step))
        return row

    def _left_s(self, step: int) -> float | None:
        """Steps to go times the median of the last twenty; None before the second."""
        return (self._num_steps - step) * float(np.median(self._recent_s)) if self._recent_s else None

    def _describe(self, row: Mapping[str, Value]) -> str:
        shown = (
            ("reward", row["reward/mean"], ".3f"),
            ("eval", self.last_eval_reward, ".3f"),
            ("nll", row["sft/nll"], ".4f"),
            ("held-out nll", row["eval/nll"], ".4f"),
            ("k3", row["parity/k3"], ".1e"),
            ("k3 of stale tokens", row["parity/k3_stale"] if row["parity/k3"] is None else None, ".1e"),
            ("entropy", row["policy/entropy"], ".2f"),
            ("stale", row["staleness/max"], ".0f"),
            ("wait", row["rollout/wait_s"], ".2f"),
            ("sync", row["sync/total_s"], ".2f"),
            ("step", row["step/total_s"], ".2f"),
        )
        text = [f"{name} {format(value, spec)}{'s' if name in ('wait', 'sync', 'step') else ''}"
                for name, value, spec in shown if value is not None]  # fmt: skip
        return "  ".join(text)

    def _write_samples(self, record: StepRecord, num_shown: int = 8) -> None:
        """The first response of each of the first groups."""
        training = record.groups[:num_shown] if record.shows_groups else ()
        held_out = record.eval_groups[:num_shown]
        for kind, group in [*(("training", group) for group in training), *(("held-out", group) for group in held_out)]:
            row: dict[str, Any] = {
                "step": record.step,
                "policy_version": record.policy_version,
                "kind": kind,
                "prompt": group.prompt.text,
                "response": group.rollouts[0].text,
                "reward": group.rewards[0],
                "parts": group.parts[0] if group.parts else {},
                "finish_reason": group.rollouts[0].finish_reason,
            }
            if group.rollouts[0].turns:
                row["turns"] = [{"given": turn.given, "said": turn.said} for turn in group.rollouts[0].turns]
                row["failure"] = group.rollouts[0].failure
            self._samples.write(json.dumps(row) + "\n")
        self._samples.flush()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl. A last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def truncate_rows(path: Path, *, after_step: int) -> None:
    """Drop rows of steps beyond `after_step`, atomically: a step is in the file once, however often a run resumed."""
    rows = read_rows(path)
    kept = [row for row in rows if row["step"] <= after_step]
    if not path.is_file():
        return
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.replace(path)


def _known(rewards: Sequence[Sequence[float | None]]) -> list[float]:
    return [reward for group in rewards for reward in group if reward is not None]


def _rollout_metrics(record: StepRecord) -> dict[str, Value]:
    if not record.groups:
        return {}
    rollouts = [rollout for group in record.groups for rollout in group.rollouts]
    rewards = _known([group.rewards for group in record.groups])
    num_response_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    lengths = [
        len(branch.token_ids)
        for group in record.groups
        for rollout in group.rollouts
        for branch in branches_of(group.prompt, rollout)
    ]
    num_tokens = sum(lengths)
    extra = record.extra
    train_s = float(extra.get("trainer/forward_backward_s") or 0) + float(extra.get("trainer/optimizer_s") or 0)
    step_s = extra.get("step/total_s")
    return {
        "reward/mean": float(np.mean(rewards)) if rewards else None,
        "reward/std": float(np.std(rewards)) if rewards else None,
        "reward/failures": len(rollouts) - len(rewards),
        "staleness/mean": float(np.mean(record.staleness_steps)),
        "staleness/max": max(record.staleness_steps),
        "rollout/tokens_per_s": num_response_tokens / step_s if step_s else None,
        "rollout/response_tokens_mean": num_response_tokens / len(rollouts),
        "rollout/truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        "rollout/evictions": sum(rollout.num_evictions for rollout in rollouts),
        **_route_metrics(rollouts, num_tokens),
        **_episode_metrics(rollouts, len(lengths)),
        "trainer/tokens_per_s_per_rank": num_tokens / train_s / record.num_ranks if train_s else None,
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
    parts = ("pause_s", "begin_s", "idle_s", "mark_s", "prepare_s", "write_s", "verify_s", "commit_s", "total_s")
    seconds: dict[str, Value] = {f"sync/{name}": getattr(report, name) for name in parts}
    return {
        **seconds,
        "sync/publish_s": report.total_s,
        "sync/wave_s": max(report.wave_s, default=report.total_s),
        "sync/bytes": report.num_bytes,
        "sync/peak_bytes": report.peak_bytes,
        "sync/watermark_bytes": report.watermark_bytes,
        "sync/changed_params": report.num_changed_params,
        "sync/replicas_committed": report.num_committed,
        "sync/replicas_relayed": report.num_relayed,
        "sync/relay_s": report.relay_s,
        "sync/relay_bytes": report.relay_bytes,
    }


def _eval_metrics(groups: Sequence[Group]) -> dict[str, Value]:
    rewards = _known([group.rewards for group in groups])
    num_rollouts = sum(len(group.rollouts) for group in groups)
    return {
        "eval/reward": float(np.mean(rewards)) if rewards else None,
        "eval/failures": num_rollouts - len(rewards),
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


def _finite(value: Value) -> Value:
    """JSON has no NaN and no infinity; a row of a refused step says null."""
    return value if value is None or math.isfinite(value) else None
