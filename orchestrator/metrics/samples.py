"""samples.jsonl: responses of training and of evaluations, token by token, for people and for `slipstream view`.

    groups --shown_rollouts--> a few of them --sample_row--> --fitted--> samples.jsonl

Owns: which rollouts of a step are shown, the form of a row, and its size. Does not own: how the trainer's figures reach
their rollouts (loop/updates.py).
Invariants: the rows of one step take RunSection.max_sample_bytes_per_step at most: what is too long loses its
middle, and says how much. A resumed run has the rows of a step once. Rows are in step order.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.files.row_files import end_of_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.metrics.held_out import Evaluation
from slipstream.rollout.types import Group, Rollout

SHORTEST_TEXT = 200
"""Characters of a text that are always kept."""
FEWEST_TOKENS = 16
"""Tokens whose figures are always kept."""
_TOKEN_LISTS = ("token_ids", "rollout_logprobs", "log_ratios", "advantages", "teacher_logprobs")


@dataclass(frozen=True, slots=True)
class TrainedRollout:
    """What the trainer made of one rollout. The lists have one entry per sampled token, None outside of the loss."""

    staleness_steps: int
    advantages: list[float | None]
    trainer_logprobs: list[float | None]


def shown_rollouts(groups: Sequence[Group], most: int) -> list[tuple[int, int]]:
    """(number of its group, number in the group) of the rollouts to show: the first of each group, then the second of
    each, until there are `most`. Which ones does not depend on what they are worth."""
    longest = max((len(group.rollouts) for group in groups), default=0)
    every = [(g, r) for r in range(longest) for g, group in enumerate(groups) if r < len(group.rollouts)]
    return every[:most]


class SampleLog:
    """Writes the file of one run. `after_step`: rows of later steps are removed: a resumed run redoes that work."""

    def __init__(self, folder: RunFolder, *, after_step: int, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._rows = folder.samples.open("a+b")
        self._rows.truncate(end_of_rows(self._rows, after_step))

    def close(self) -> None:
        self._rows.close()

    def write(
        self,
        step: int,
        policy_version: int,
        training: Sequence[Group],
        evaluations: Sequence[Evaluation],
        trained: Mapping[tuple[int, int], TrainedRollout],
    ) -> None:
        """Add the rows of one step, as many and as long as the options allow, of each held-out set."""
        rows = [
            sample_row(step, policy_version, "training", place, training[place[0]], trained.get(place))
            for place in shown_rollouts(training, self._most)
        ]
        for one in evaluations:
            for name, groups in one.groups.items():
                about = {"set": name} if name else {}
                rows += [
                    sample_row(step, one.policy_version, "held-out", place, groups[place[0]], None) | about
                    for place in shown_rollouts(groups, self._most)
                ]
        left = self._most_bytes
        lines: list[bytes] = []
        for number, row in enumerate(rows):
            line = fitted(row, left // (len(rows) - number))
            if line is not None:
                lines.append(line)
                left -= len(line)
        self._rows.write(b"".join(lines))
        self._rows.flush()


def sample_row(
    step: int, policy_version: int, kind: str, place: tuple[int, int], group: Group, trained: TrainedRollout | None
) -> JsonObject:
    """One row; docs/metrics.md has the meaning of each field."""
    number, which = place
    rollout = group.rollouts[which]
    row: JsonObject = {
        "step": step,
        "policy_version": policy_version,
        "kind": kind,
        "group": number,
        "sibling": which,
        "prompt_id": group.prompt.prompt_id,
        "reward": _rounded(group.rewards[which]),
        "parts": group.parts[which] if group.parts else {},
        "finish_reason": rollout.finish_reason,
        "num_tokens": len(rollout.token_ids),
        **(_figures(rollout, trained) if trained is not None else {}),
        "prompt": group.prompt.text,
        "response": rollout.text,
        "versions": [[version, len(list(same))] for version, same in groupby(rollout.policy_versions)],
        "token_ids": list(rollout.token_ids),
        "rollout_logprobs": [_rounded(value) for value in rollout.logprobs],
    }
    if rollout.teacher_logprobs is not None:
        row["teacher_logprobs"] = [_rounded(value) for value in rollout.teacher_logprobs]
    if trained is not None:
        pairs = zip(trained.trainer_logprobs, rollout.logprobs, strict=True)
        row["log_ratios"] = [None if own is None else _rounded(own - engine) for own, engine in pairs]
        advantages = [_rounded(value) for value in trained.advantages]
        row["advantages"] = advantages[:1] if len(set(advantages)) == 1 else advantages
    if rollout.turns:
        shown = ("parent", "reason", "num_tokens", "given", "said")
        row["turns"] = [{name: getattr(turn, name) for name in shown} for turn in rollout.turns]
        row["failure"] = rollout.failure
    return row


def fitted(row: JsonObject, most_bytes: int) -> bytes | None:
    """The row as a line of at most `most_bytes`. Texts and lists of tokens that are too long lose their middle; None
    when that is not enough.

    A token list that was cut has `cut`: [first, end) of the tokens that are left out of all lists.
    """
    line = _line(row)
    num_chars = max((len(text) for _, _, text in _texts(row)), default=0)
    num_tokens = len(row["token_ids"])
    while len(line) > most_bytes:
        if num_chars <= SHORTEST_TEXT and num_tokens <= FEWEST_TOKENS:
            return None
        num_chars, num_tokens = max(num_chars // 2, SHORTEST_TEXT), max(num_tokens // 2, FEWEST_TOKENS)
        line = _line(_shortened(row, num_chars, num_tokens))
    return line


def _figures(rollout: Rollout, trained: TrainedRollout) -> JsonObject:
    advantages = [value for value in trained.advantages if value is not None]
    pairs = zip(trained.trainer_logprobs, rollout.logprobs, strict=True)
    ratios = [min(max(own - engine, -20.0), 20.0) for own, engine in pairs if own is not None]
    k3 = [math.expm1(ratio) - ratio for ratio in ratios]
    return {
        "staleness": trained.staleness_steps,
        "mean_advantage": _rounded(math.fsum(advantages) / len(advantages)) if advantages else None,
        "k3": _rounded(math.fsum(k3) / len(k3)) if k3 else None,
        "k3_max": _rounded(max(k3)) if k3 else None,
    }


def _shortened(row: JsonObject, num_chars: int, num_tokens: int) -> JsonObject:
    short = {**row, "turns": [dict(turn) for turn in row["turns"]]} if "turns" in row else dict(row)
    for name, turn, text in _texts(short):
        holder = short if turn is None else short["turns"][turn]
        holder[name] = _cut_text(text, num_chars)
    total = len(row["token_ids"])
    if total > num_tokens:
        first, end = num_tokens // 2, total - (num_tokens - num_tokens // 2)
        short["cut"] = [first, end]
        for name in _TOKEN_LISTS:
            if len(short.get(name, ())) == total:
                short[name] = [*short[name][:first], *short[name][end:]]
    return short


def _texts(row: JsonObject) -> list[tuple[str, int | None, str]]:
    """(field, number of its turn, text)."""
    turns = row.get("turns", [])
    return [
        *((name, None, row[name]) for name in ("prompt", "response")),
        *((name, number, turn[name]) for number, turn in enumerate(turns) for name in ("given", "said")),
    ]


def _cut_text(text: str, num_chars: int) -> str:
    if len(text) <= num_chars:
        return text
    half = num_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters are left out here ...]\n{text[-half:]}"


def _line(row: JsonObject) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _rounded(value: float | None) -> float | None:
    """Four significant digits are more than a page shows, and half the bytes. JSON has neither NaN nor infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
