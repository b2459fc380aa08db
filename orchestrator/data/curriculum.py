"""A curriculum: prompts that the policy sometimes solves come more often than those it always or never solves.

    weight of a prompt = max(floor, 4 p (1 - p)),   p = observed success rate;   1 for a prompt not seen yet

p (1 - p) is the variance of a success. It is the "learnability" by which Foster et al. 2025 (arXiv:2502.12272, after
Rutherford et al. 2024, arXiv:2408.15099) choose questions: with p = 0 or 1 all advantages of a group are zero. The
floor keeps coming back to prompts that were out of reach, or solved, under an earlier policy.

Owns: success rates and the order that follows them.
Invariant: what is drawn next depends only on seed, number of draws and observations, all of which are in the cursor.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.data.streams import DIGEST, Stream, check_cursor, digest
from slipstream.rollout.errors import DataError
from slipstream.rollout.types import Prompt

_DRAWS = 0x43
"""Keeps draws apart from those of other random numbers with the same seed."""
_KEPT = 0.5
"""What an observation keeps of its weight when the prompt is observed again: the policy has changed since."""


def learnability(successes: np.ndarray, trials: np.ndarray, floor: float) -> np.ndarray:
    """Weights of prompts, in [floor, 1], from the sums of their rewards and how many these were: [N] float64."""
    rate = np.divide(successes, trials, out=np.full_like(trials, 0.5), where=trials > 0)
    return np.maximum(floor, 4.0 * rate * (1.0 - rate))


class Middling(Stream[Prompt]):
    """Draws prompts by `learnability`. A prompt that was drawn and not yet observed is left out while there are others.
    Seed and number of draws decide a draw; each prompt has another id.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, *, floor: float) -> None:
        if not prompts:
            raise DataError("a curriculum needs at least one prompt")
        self._prompts = list(prompts)
        self._index = {prompt.prompt_id: index for index, prompt in enumerate(prompts)}
        self._seed = seed
        self._floor = floor
        self._facts = {DIGEST: digest(self._prompts), "seed": seed, "floor": floor}
        self._successes = np.zeros(len(prompts))
        self._trials = np.zeros(len(prompts))
        self._num_drawn = 0
        self._in_flight: Counter[int] = Counter()
        """Draws of a prompt, by its index, that are not observed yet."""

    @property
    def epoch(self) -> int:
        return self._num_drawn // len(self._prompts)

    def __next__(self) -> Prompt:
        weights = learnability(self._successes, self._trials, self._floor)
        waiting = list(self._in_flight)
        if len(waiting) < len(self._prompts):
            weights[waiting] = 0.0
        bounds = np.cumsum(weights)
        draw = np.random.default_rng((self._seed, _DRAWS, self._num_drawn)).random() * float(bounds[-1])
        index = min(int(np.searchsorted(bounds, draw, side="right")), len(self._prompts) - 1)
        self._num_drawn += 1
        self._in_flight[index] += 1
        return self._prompts[index]

    def observe(self, prompt_id: int, rewards: Sequence[float | None]) -> None:
        """Rewards below 0 count as 0, those above 1 as 1; those that failed do not count."""
        index = self._index[prompt_id]
        self._in_flight[index] -= 1
        if self._in_flight[index] <= 0:
            del self._in_flight[index]
        known = [min(max(reward, 0.0), 1.0) for reward in rewards if reward is not None]
        if known:
            self._successes[index] = _KEPT * self._successes[index] + sum(known)
            self._trials[index] = _KEPT * self._trials[index] + len(known)

    def metrics(self) -> dict[str, float | None]:
        seen = self._trials > 0
        rates = self._successes[seen] / self._trials[seen]
        return {
            "data/epoch": self.epoch,
            "data/seen_fraction": float(seen.mean()),
            "data/success_rate": float(rates.mean()) if len(rates) else None,
            "data/middling_fraction": float(((rates > 0) & (rates < 1)).mean()) if len(rates) else None,
        }

    def state_dict(self) -> JsonObject:
        observed = [[int(i), self._successes[i], self._trials[i]] for i in np.flatnonzero(self._trials)]
        in_flight = sorted(self._in_flight.items())
        return {"num_drawn": self._num_drawn, "observed": observed, "in_flight": in_flight, **self._facts}

    def load_state_dict(self, state: JsonObject) -> None:
        options = {"seed": "run.seed", "floor": "data.curriculum_floor", DIGEST: "data.path"}
        check_cursor(state, self._facts, options)
        self._num_drawn = int(state["num_drawn"])
        self._in_flight = Counter({int(index): int(count) for index, count in state["in_flight"]})
        self._successes[:] = self._trials[:] = 0.0
        for index, successes, trials in state["observed"]:
            self._successes[index], self._trials[index] = successes, trials
