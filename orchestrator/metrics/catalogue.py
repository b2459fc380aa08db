"""The catalogue of metrics: every name that a row may have, with its meaning.

Owns: names and meanings (`METRICS`, `REWARD_METRICS` and `JUDGE_METRICS`), which docs/metrics.md repeats. Does not own:
names of evaluations' figures (metrics/held_out.py), how rows are computed (step_rows.py), where they go (telemetry.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.orchestrator.metrics.held_out import EVAL_METRICS, EvalNames
from slipstream.rollout.agents.failures import FAILURES
from slipstream.rollout.agents.token_tree import REASONS

Value = float | int | None
"""A number of a row; None where the step has no such number."""

METRICS: dict[str, str] = {
    "step": "optimizer steps done",
    "policy_version": "version that the step produced",
    "reward/mean": "mean reward of the batch's rollouts",
    "reward/std": "standard deviation of the same",
    "reward/failures": "rollouts whose reward raised or timed out; they are left out",
    "reward/rollouts": "the batch's rollouts, with these",
    "reward/no_spread_fraction": "share of the batch's groups whose rewards are all equal; null for groups of one",
    **EVAL_METRICS,
    "sync/total_s": "seconds of the whole publish",
    "sync/pause_s": "longest time in which a replica decoded nothing",
    "sync/begin_s": "pause engines, mark them dirty, collect their answers",
    "sync/idle_s": "part of begin_s: until the slowest engine stood still, its step in flight included",
    "sync/mark_s": "part of begin_s: from then until the ranks of all engines were marked dirty",
    "sync/prepare_s": "merge, cast and pack, on the slowest rank; overlaps with write_s",
    "sync/write_s": "one-sided writes, on the slowest rank",
    "sync/verify_s": "hashes compared at the receivers",
    "sync/commit_s": "repack, recompute, adopt the version, resume",
    "sync/bytes": "bytes written over the link, all ranks",
    "sync/peak_bytes": "most temporary device memory on one rank",
    "sync/watermark_bytes": "the declared bound on it",
    "sync/changed_params": "engine parameters whose bytes differ from the last publish's; null at the first one",
    "sync/changed_fraction": "share of the elements that engines get whose bits changed since the last publish, from a "
    "sample; null at the first one and in adapter mode",
    "sync/update_error": "share of the adapter's update that merged weights lost in rounding, from a sample: 0 none, "
    "1 all; null without one",
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
    **{
        f"parity/{name}_stale": f"parity/{name} of those"
        for name in ("k3_p99", "k3_max", "prob_diff", "prob_diff_max", "log_ratio_max")
    },
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
    "distill/kl_mean": "mean log mu - log teacher of the batch's tokens, mu the policy that sampled: KL(mu || teacher)",
    "distill/failures": "responses since the last step for which the teacher failed; they are left out",
    "distill/retries": "requests to the teacher since the last step that repeated one that failed",
    "distill/response_s": "mean seconds until the teacher had answered about one response",
    "dpo/loss": "algorithm=dpo: mean loss of a pair; log 2 where the policy is the one before training",
    "dpo/accuracy": "algorithm=dpo: share of pairs whose chosen answer has the larger reward; 0 before any update",
    "dpo/margin_mean": "algorithm=dpo: mean reward, dpo_beta * log(policy / reference), chosen minus rejected",
    "dpo/chosen_reward": "algorithm=dpo: mean reward of the chosen answers",
    "dpo/rejected_reward": "algorithm=dpo: mean reward of the rejected answers",
    "dpo/epoch": "algorithm=dpo: passes over data.path that are complete",
    "eval/dpo_loss": "algorithm=dpo: dpo/loss of the held-out pairs, under policy_version",
    "eval/dpo_accuracy": "algorithm=dpo: dpo/accuracy of the held-out pairs",
    "optim/grad_norm": "global gradient norm before clipping",
    "optim/lr": "learning rate of the step",
    "optim/updates": "updates of the step that were applied; null with algorithm=sft and algorithm=dpo",
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
    "rollout/evictions": "requests of these responses that a publish ended for their slot (weight_sync.pause_mode)",
    "rollout/groups_failed": "groups sampled again since the last step because their worker failed",
    "rollout/groups_uninformative": "groups replaced since the last step because their rewards were all equal",
    "rollout/replicas_serving": "replicas in service",
    "rollout/replicas_wanted": "rollout workers that were asked for last; of a range, those that there is room for",
    "rollout/handed_over": "responses since the last step that others went on with because their worker was told to "
    "go, or its engine died",
    "rollout/restarts": "rollout workers started again since the last step",
    "rollout/recoveries": "rollout workers that came back into service since the last step",
    "rollout/down_s": "longest time that one of those was out of service",
    "rollout/recovery_read_s": "seconds it read its weights from a peer; null when a publish brought them",
    "data/epoch": "passes over the training prompts that are complete; of several sources, of the slowest",
    "data/share_error": "largest difference between a source's share of the prompts and its weight (data.sources)",
    "data/seen_fraction": "data.order=middling: prompts that were sampled at least once",
    "data/success_rate": "data.order=middling: mean success rate of those, newer groups counting more",
    "data/middling_fraction": "data.order=middling: those among them that are neither always nor never solved",
    "trainer/score_s": "seconds of the log-probabilities before the first update; null where none are computed",
    "trainer/forward_backward_s": "seconds of forward and backward, slowest rank",
    "trainer/optimizer_s": "seconds of the optimizer step",
    "trainer/tokens_per_s_per_rank": "prompt and response tokens over those seconds and ranks",
    "trainer/num_tokens": "prompt and response tokens that the step trained on, on all ranks, those of each epoch",
    "trainer/num_microbatches": "microbatches of one rank",
    "trainer/peak_device_bytes": "most GPU memory of one rank in forward and backward; null on CPUs",
    "trainer/restarts": "times since the last step that all trainer ranks were started again, because one had died",
    "trainer/down_s": "seconds that this took, part of the step's",
    "trainer/unkept_steps": "finished steps that a trainer rank's death makes again at most; null: it ends the run",
    "step/total_s": "seconds of the step, waits included",
    "step/between_s": "seconds from the end of the step before to this one's start: copies for a checkpoint; null for "
    "the first one after a start",
    "step/redone_s": "at the first step after a resume: seconds of the steps that are made again; else null",
    "step/gpus": "GPUs of the run, the trainer's and those of the workers that are wanted; on CPUs their processes",
    "step/goodput": "share of the GPU-seconds of the last 100 steps that went into trained tokens, at the quiet rate "
    "of a GPU (docs/checkpoints.md); null before three quiet steps",
}

REWARD_METRICS: dict[str, str] = {
    "reward/<name>_mean": "mean of what one reward gave to those of the batch's rollouts that it judged, before its "
    "weight; reward/mean leaves out rollouts for which another one failed",
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
NO_EVALS = EvalNames()


def catalogue(rewards: RewardNames, evals: EvalNames = NO_EVALS) -> dict[str, str]:
    """Name -> meaning of every metric of a run with these rewards and evaluations."""
    found = METRICS | evals.metrics
    for names, metrics in ((rewards.all, REWARD_METRICS), (rewards.judges, JUDGE_METRICS)):
        found |= {metric.replace("<name>", name): meaning for name in names for metric, meaning in metrics.items()}
    return found
