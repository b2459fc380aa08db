"""What goes into and comes out of a rollout worker. Plain data: importable without torch and without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: the rollouts of one prompt, with their rewards."""

    prompt: Prompt
    rollouts: list[Rollout]
    rewards: list[float | None]
    """One per rollout; None if the reward raised or timed out, and then its sample is left out."""

    @property
    def oldest_version(self) -> int:
        """Oldest policy version in any token of the group."""
        return min(version for rollout in self.rollouts for version in rollout.policy_versions)
