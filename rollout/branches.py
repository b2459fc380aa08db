"""The token sequences of a rollout, as the trainer takes them: one response, or the branches of an agent's episode.

Owns: how turns that go on from each other are put together. Does not own: why one does (rollout/agents/token_tree.py).
Invariants: a sequence is what the engine was given and what it sampled, id for id: a turn's prompt is stored as its
parent and the tokens after that, so it cannot differ from them. Every sampled token counts in one sequence exactly.

    turns          0 <- 1 <- 3        turn 3 goes on from turn 1, turn 2 from turn 0
                   ^--- 2
    sequences      0 1 3              given, sampled, given, sampled, given, sampled
                   0 2                the tokens of turn 0 again, as context that does not count
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from slipstream.rollout.types import Prompt, Rollout, Routes


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence. The lists have one entry per token."""

    token_ids: list[int]
    counts: list[bool]
    """Whether the engine sampled the token, and no earlier sequence of the rollout has it."""
    logprobs: list[float]
    """The engine's log-probability of each token that counts, 0 of others."""
    policy_versions: list[int]
    """The version of each token that counts, in order."""
    places: Sequence[int]
    """Where each token that counts is in the rollout's lists, in order."""
    routes: Routes | None = None

    @property
    def first_response(self) -> tuple[list[int], list[int], list[float]]:
        """(tokens before the first one that counts, the tokens that count from there on without a gap, their
        log-probabilities)."""
        start = self.counts.index(True)
        stop = next((i for i in range(start, len(self.counts)) if not self.counts[i]), len(self.counts))
        return self.token_ids[:start], self.token_ids[start:stop], self.logprobs[start:stop]


def branches_of(prompt: Prompt, rollout: Rollout) -> list[Branch]:
    """The sequences of a rollout, in the order of their last turns; none of an episode without a turn."""
    if not rollout.turns:
        if not rollout.token_ids:
            return []
        num_prompt = len(prompt.token_ids)
        return [
            Branch(
                [*prompt.token_ids, *rollout.token_ids],
                [False] * num_prompt + [True] * len(rollout.token_ids),
                [0.0] * num_prompt + rollout.logprobs,
                rollout.policy_versions,
                range(len(rollout.token_ids)),
                rollout.routes,
            )
        ]
    parents = {turn.parent for turn in rollout.turns}
    counted: set[int] = set()
    return [_branch(rollout, leaf, counted) for leaf in range(len(rollout.turns)) if leaf not in parents]


def context_of(turns: Mapping[int, tuple[int | None, Sequence[int]]], last: int | None) -> list[int]:
    """All tokens up to the end of turn `last`; none for None. `turns`: number -> (parent, given and sampled tokens)."""
    parts: list[Sequence[int]] = []
    while last is not None:
        parent, tokens = turns[last]
        parts.append(tokens)
        last = parent
    return [token for part in reversed(parts) for token in part]


def _branch(rollout: Rollout, leaf: int, counted: set[int]) -> Branch:
    """The sequence that ends with turn `leaf`. Its turns that are not in `counted` count, and are noted there."""
    ends = list(accumulate(turn.num_tokens for turn in rollout.turns))
    path: list[int] = []
    number: int | None = leaf
    while number is not None:
        path.insert(0, number)
        number = rollout.turns[number].parent
    places = list[int]()
    branch = Branch([], [], [], [], places, _routes([rollout.turns[number].routes for number in path]))
    for number in path:
        turn = rollout.turns[number]
        sampled = slice(ends[number] - turn.num_tokens, ends[number])
        is_new = number not in counted
        counted.add(number)
        branch.token_ids.extend([*turn.given_token_ids, *rollout.token_ids[sampled]])
        branch.counts.extend([False] * len(turn.given_token_ids) + [is_new] * turn.num_tokens)
        logprobs = rollout.logprobs[sampled] if is_new else [0.0] * turn.num_tokens
        branch.logprobs.extend([0.0] * len(turn.given_token_ids) + logprobs)
        branch.policy_versions.extend(rollout.policy_versions[sampled] if is_new else [])
        places.extend(range(sampled.start, sampled.stop) if is_new else [])
    return branch


def _routes(parts: Sequence[Routes | None]) -> Routes | None:
    known = [part for part in parts if part is not None]
    return known[0].then(*known[1:]) if known else None
