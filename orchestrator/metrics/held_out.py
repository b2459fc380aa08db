"""Figures of an evaluation: of each held-out set, and of all of them together. Pure.

    groups of a set --> one value per prompt --> mean and standard error --> eval/reward, eval/reward_se, ...

Owns: the names of these figures, what they mean, their formulas (pass@k, majority vote), which of them can choose the
best checkpoint. Does not own: what counts as right, or as an answer (rollout/rewards), when an evaluation takes place
(loop/evaluations.py), where figures go (telemetry.py). Samples of one prompt are not independent of each other, so
every standard error is over prompts.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.conf.schema import Objective, RunConfig
from slipstream.rollout.types import Group

Figures = dict[str, float | int | None]
_ROUNDING, _LEAST_ROUNDING = 1e-6, 1e-9
"""Relative, and in itself: the sum of 0.6, 0.3 and 0.1 is less than 1, and more so in float32."""

EVAL_METRICS: dict[str, str] = {
    "eval/step": "step whose policy the row's evaluation began with (run.eval_beside: an earlier one than the row's)",
    "eval/reward": "mean reward on held-out prompts",
    "eval/reward_se": "its standard error, over prompts",
    "eval/majority": "share of held-out prompts whose most frequent answer is right; null if rewards tell no answers",
    "eval/majority_se": "its standard error",
    "eval/failures": "held-out rollouts whose reward raised or timed out",
    "eval/rollouts": "held-out rollouts, with these",
    "eval/total_s": "seconds of the evaluation",
    "eval/wait_s": "part of the step: seconds that training waited for an evaluation",
    "eval/version_spread": "newest version that sampled a token of the evaluation minus the one that it began with",
    "eval/other_version_fraction": "share of the evaluation's tokens that another version than that one sampled",
}
"""Figures of every evaluation of a run with rewards."""

PASS_METRICS: dict[str, str] = {
    "eval/pass_at_<k>": "unbiased estimate of pass@k on held-out prompts, k: run.eval_samples_per_prompt, 1, 2, 4 ...",
    "eval/pass_at_<k>_se": "its standard error, over prompts",
}

SET_METRICS: dict[str, str] = {
    "eval/<set>/reward": "eval/reward of one of data.eval_sets",
    "eval/<set>/reward_se": "its standard error",
    "eval/<set>/majority": "eval/majority of that set",
    "eval/<set>/majority_se": "its standard error",
    "eval/<set>/pass_at_<k>": "the same estimate of that set",
    "eval/<set>/pass_at_<k>_se": "its standard error",
    "eval/<set>/nll": "algorithm=sft: eval/nll of that set",
    "eval/<set>/dpo_loss": "algorithm=dpo: eval/dpo_loss of that set",
    "eval/<set>/dpo_accuracy": "algorithm=dpo: eval/dpo_accuracy of that set",
}
"""Figures of every named set."""

TAUGHT_FIGURES: dict[Objective, tuple[tuple[str, str, str], ...]] = {
    Objective.sft: (("nll", "sft/nll_sum", "policy/num_tokens"),),
    Objective.dpo: (
        ("dpo_loss", "dpo/loss_sum", "dpo/num_pairs"),
        ("dpo_accuracy", "dpo/num_preferred", "dpo/num_pairs"),
    ),
}
"""Objective -> (name, sum, count by which it is divided) of the figures of its evaluations."""


def is_informative(rewards: Sequence[float | None]) -> bool:
    """Whether a group has at least two different rewards, so that comparing them says something. None: it failed."""
    return len({reward for reward in rewards if reward is not None}) > 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts. Example: Estimate(0.62, 0.04, 150)."""

    mean: float
    error: float | None
    """Its standard error; None of a single prompt."""
    num_prompts: int


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples, drawn from these without putting any back, is right: the unbiased estimate
    of pass@k (Chen et al. 2021, arXiv:2107.03374, equation 1), 1 - C(n - c, k) / C(n, k), c of n samples being right.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_right} of them right")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_vote(answers: Sequence[str | None], is_right: Sequence[bool]) -> float:
    """Chance that the answer which most samples give is right (Wang et al. 2022, arXiv:2203.11171).

    Of answers with equally many votes each is taken with the same chance. A sample without an answer has no vote, and
    without votes the result is 0. An answer that is judged both ways counts by the share of its samples that are right.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = Counter(answer for answer, right in zip(answers, is_right, strict=True) if right)
    return sum(right[answer] / votes[answer] for answer in winners) / len(winners)


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value per prompt, with standard error sqrt(sum (x - mean)^2 / (m - 1) / m); None without any."""
    num = len(values)
    if not num:
        return None
    mean = math.fsum(values) / num
    if num == 1:
        return Estimate(mean, None, num)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return Estimate(mean, math.sqrt(variance / num), num)


@dataclass(frozen=True, slots=True)
class EvalNames:
    """What a run's evaluations have names for. Example: EvalNames(("gsm8k", "aime"), (1, 8))."""

    sets: Sequence[str] = ()
    """Names of data.eval_sets; none of data.eval_path."""
    ks: Sequence[int] = ()
    """Every k of pass@k."""

    @property
    def metrics(self) -> dict[str, str]:
        """Name -> meaning of the figures that depend on these names."""
        found: dict[str, str] = {}
        for part, of in [(PASS_METRICS, [""]), (SET_METRICS, list(self.sets))]:
            for (name, meaning), one in itertools.product(part.items(), of):
                for k in self.ks if "<k>" in name else [0]:
                    found[name.replace("<set>", one).replace("<k>", str(k))] = meaning
        return found


@dataclass(frozen=True, slots=True)
class Evaluation:
    step: int
    policy_version: int
    """The version that it began with."""
    groups: Mapping[str, Sequence[Group]]
    """By the set's name; "" for data.eval_path."""
    figures: Figures = field(default_factory=Figures)

    @property
    def all_groups(self) -> list[Group]:
        return [group for groups in self.groups.values() for group in groups]


def eval_names(config: RunConfig) -> EvalNames:
    sets = tuple(name for name in config.data.held_out_sources if name)
    return EvalNames(sets, () if config.algorithm.objective is not Objective.policy else config.run.pass_ks)


def of_sets(figures: Mapping[str, float | int | None], figure: str) -> dict[str, float]:
    """A figure of each named set, by the set's name."""
    keys = ((key, key.split("/")) for key in figures)
    named = {parts[1]: figures[key] for key, parts in keys if len(parts) == 3 and parts[::2] == ["eval", figure]}
    return {name: value for name, value in named.items() if value is not None}


def in_words(figures: Mapping[str, float | int | None], figure: str, spec: str = ".3f") -> str | None:
    """A figure of all held-out rows, and of each named set: "0.500 (gsm8k 0.750, aime 0.250)". None: there is none."""
    value = figures.get(f"eval/{figure}")
    if value is None:
        return None
    sets = ", ".join(f"{name} {format(one, spec)}" for name, one in of_sets(figures, figure).items())
    return f"{format(value, spec)} ({sets})" if sets else format(value, spec)


def choosing_metrics(config: RunConfig) -> list[str]:
    """Figures by which run.keep_best may choose; larger ones are better, but for those that is_better names."""
    names = eval_names(config)
    if config.algorithm.objective is not Objective.policy:
        found = [name for name, _, _ in TAUGHT_FIGURES[config.algorithm.objective]]
    else:
        found = ["reward", "majority", *(f"pass_at_{k}" for k in names.ks)]
    return [f"eval/{one}" for one in found] + [f"eval/{name}/{one}" for name in names.sets for one in found]


def is_better(metric: str, value: float, best: float) -> bool:
    """Whether an evaluation's value is better than the best one so far. An equal one is not: the earlier step stays."""
    return value < best if metric.endswith(("nll", "loss")) else value > best


def evaluate_groups(
    groups: Mapping[str, Sequence[Group]], version: int, names: EvalNames, right_from: float
) -> Figures:
    """All figures of an evaluation but its seconds. `version`: the one that the evaluation began with. `right_from`: a
    response with this reward or a larger one is right, whatever its length took from it."""
    everything = [group for of_set in groups.values() for group in of_set]
    figures = _figures_of(everything, "eval", names.ks, right_from)
    for name in names.sets:
        figures |= _figures_of(groups.get(name, ()), f"eval/{name}", names.ks, right_from)
    known = [reward for group in everything for reward in group.rewards if reward is not None]
    num_rollouts = sum(len(group.rewards) for group in everything)
    figures |= {"eval/failures": num_rollouts - len(known), "eval/rollouts": num_rollouts}
    versions = [v for group in everything for rollout in group.rollouts for v in rollout.policy_versions]
    if versions:
        figures["eval/version_spread"] = max(versions) - version
        figures["eval/other_version_fraction"] = sum(one != version for one in versions) / len(versions)
    return figures


def _figures_of(groups: Sequence[Group], prefix: str, ks: Sequence[int], right_from: float) -> Figures:
    """One set's. Responses without a reward count nowhere; a prompt with fewer than k others is not in pass@k."""
    judged = [_judged(group, right_from) for group in groups]
    judged = [samples for samples in judged if samples]
    means = [sum(reward for reward, _, _ in samples) / len(samples) for samples in judged]
    right = [[is_right for _, is_right, _ in samples] for samples in judged]
    figures = _named(f"{prefix}/reward", estimate(means))
    for k in ks:
        values = [pass_at_k(len(of_one), sum(of_one), k) for of_one in right if len(of_one) >= k]
        figures |= _named(f"{prefix}/pass_at_{k}", estimate(values))
    answers = [[answer for _, _, answer in samples] for samples in judged]
    has_answers = any(answer is not None for of_one in answers for answer in of_one)
    votes = [majority_vote(given, of_one) for given, of_one in zip(answers, right, strict=True)]
    return figures | _named(f"{prefix}/majority", estimate(votes) if has_answers else None)


def _judged(group: Group, right_from: float) -> list[tuple[float, bool, str | None]]:
    """(reward, whether it is right, answer) of the responses that have a reward. A long one may be right as well."""
    nothing = [None] * len(group.rewards)
    samples = zip(group.rewards, group.rewards_for_content, group.answers or nothing, strict=True)
    least = right_from - max(_ROUNDING * abs(right_from), _LEAST_ROUNDING)
    return [
        (reward, content >= least, answer)
        for reward, content, answer in samples
        if reward is not None and content is not None
    ]


def _named(name: str, found: Estimate | None) -> Figures:
    return {name: None if found is None else found.mean, f"{name}_se": None if found is None else found.error}
