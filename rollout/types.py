"""What goes into and comes out of a rollout worker. Plain data: importable without torch and without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weight_sync.layout import TensorMeta

PROBE = -1
"""Version of an adapter that is noise and not a policy: it shows whether the engine applies adapters."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter that a request names. Example: Adapter(slot=1, version=7)."""

    slot: int
    version: int
    purpose: str = "policy version"

    @property
    def name(self) -> str:
        """Part of the key of prefix blocks. Versions share slots but never a name, and so never a prefix block."""
        return f"{self.purpose} {self.version}"

    @property
    def lora_id(self) -> int:
        """The engine's number for the slot."""
        return self.slot + 1


@dataclass(frozen=True, slots=True)
class AdapterSlotsSpec:
    """The adapters that an engine is to serve from slots (weight_sync.mode=adapter)."""

    num_slots: int
    """Versions that can be held at once, including the one being written."""
    rank: int
    """Rank of the slots; one of conf.schema.ENGINE_LORA_RANKS."""
    target_modules: tuple[str, ...]
    """Last names of the modules that have an adapter."""
    tensors: tuple[TensorMeta, ...]
    """Every factor of the adapter, padded to the slots' rank."""
    base: Path | None = None
    """Checkpoint from which engines load a base that no publish can write (INT4). None: the base is published."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompt file, tokenized. Example: Prompt(7, (3, 12, 5), "k 3 a =", {"answer": "a"})."""

    prompt_id: int
    """Row number in the file, from 0."""
    token_ids: tuple[int, ...]
    text: str
    """The prompt as the model sees it, for logs and for rewards."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, for rewards."""


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """What an engine records for each token (parity.replay_routing). Example: RoutingShape((1, 2), 8, 128)."""

    layers: tuple[int, ...]
    """Decoder layers with experts, ascending."""
    top_k: int
    """Experts of a token in each of them."""
    num_experts: int

    @property
    def dtype(self) -> type[np.unsignedinteger[Any] | np.signedinteger[Any]]:
        """The narrowest that torch has for these experts."""
        return np.uint8 if self.num_experts <= 256 else np.int16


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts that the engine chose at the first N positions of prompt and response, N one less than their tokens:
    the last sampled token was never fed to the model. Made by rollout/routes.py."""

    experts: np.ndarray
    """[N, layers with experts, experts per token] uint8, or int16 with more than 256 experts."""
    is_recorded: np.ndarray
    """[N] bool; False where the engine's choice is not known."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response. All lists have one entry per response token."""

    token_ids: list[int]
    logprobs: list[float]
    """The engine's log-probability of each token at sampling time (rollout_logprobs)."""
    policy_versions: list[int]
    """Policy version that sampled each token; non-decreasing."""
    text: str
    """What rewards judge. It contains special tokens only if reward.keep_special_tokens is set."""
    finish_reason: str
    """"stop" (end of sequence) or "length"."""
    num_evictions: int = 0
    """How often a publish ended this response's request because it needed the adapter slot that the request read."""
    routes: Routes | None = None
    """None: the engine was not asked (parity.replay_routing=false)."""

    @property
    def num_tokens_without_route(self) -> int:
        """Response tokens that were sampled at a position whose route is missing."""
        if self.routes is None:
            return 0
        sampled_at = self.routes.is_recorded[len(self.routes.is_recorded) - len(self.token_ids) :]
        return int(np.count_nonzero(~sampled_at))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one rollout worker has sampled. Times are seconds since 1970, by its machine's clock."""

    at: float
    """When it answered."""
    num_tokens: int
    """Response tokens since its start, those of unfinished responses included."""
    first_token_at: float | None
    """When the first of them came; None: not yet."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one rollout is worth. Example: Judgement(0.9, {"math": 1.0, "brevity": -0.5}) with a weight of 0.2."""

    reward: float | None
    """What the advantage is computed from. None if a part failed, and then the sample is left out."""
    parts: dict[str, float | None] = field(default_factory=dict)
    """What each reward gave, before its weight, by its name; None for one that raised or timed out."""


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: the rollouts of one prompt, with their rewards."""

    prompt: Prompt
    rollouts: list[Rollout]
    rewards: list[float | None]
    """One per rollout (Judgement.reward)."""
    parts: list[dict[str, float | None]] = field(default_factory=list)
    """One per rollout (Judgement.parts)."""

    @property
    def oldest_version(self) -> int:
        """Oldest policy version in any token of the group."""
        return min(version for rollout in self.rollouts for version in rollout.policy_versions)
