"""What goes into and comes out of a rollout worker. Plain data: importable without torch and without vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from slipstream.conf.schema import Device, DType, RolloutConfig, WeightSyncConfig
from slipstream.conf.schema.reward import SHAPINGS
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.merging.factors import OwnMergeSpec

ABORTED = "abort"
"""finish_reason of a response that a pause, or the end of its version, has ended."""
PROBE = -1
"""Version of an adapter that is noise and not a policy: it shows whether the engine applies adapters."""

LANGUAGE_MODEL = "slipstream_language_model"
"""Load format of an engine that reads the language model of a checkpoint with a vision tower."""


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
    """The adapters that an engine is to serve from slots."""

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
    messages: list[dict[str, Any]] | None = None
    """The row's prompt column where that is a list of chat messages; None: it is text."""


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """What an engine records for each token (parity.replay_routing). Example: RoutingShape((1, 2), 8, 128)."""

    layers: tuple[int, ...]
    """Decoder layers with experts, ascending."""
    top_k: int
    """Experts of a token in each of them."""
    num_experts: int

    @property
    def dtype(self) -> type[np.uint8 | np.int16]:
        """The narrowest that torch has for these experts."""
        return np.uint8 if self.num_experts <= 256 else np.int16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    folder: Path
    """Model folder: config.json, generation_config.json and tokenizer.json; no weights."""
    config: RolloutConfig
    dtype: DType
    device: Device
    adapters: AdapterSlotsSpec | None = None
    """Its slots, when weight_sync.mode=adapter; None: requests use no adapters."""
    routing: RoutingShape | None = None
    """Shape of the model's routing, for rollouts that carry their routes."""
    batch_invariant: bool = False
    """Take kernels whose results for a token do not depend on the batch that it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(EngineOptions):
    """What every rollout worker of a run is built from. With adapter slots, base weights come once, over endpoint() or
    from disk, and policy versions over adapter_endpoint()."""

    weight_sync: WeightSyncConfig
    tensors: Sequence[TensorMeta]
    """Every checkpoint tensor of the model (ModelSpec.checkpoint_tensors())."""
    key: bytes
    """The run's key, shared with the publisher."""
    own_merge: OwnMergeSpec | None = None
    """What the engine merges for itself, with weight_sync.remote_merge."""
    keep_special_tokens: bool = False
    num_versions_kept: int = 0
    """For how many further versions a sampled group is kept for a controller that takes the run over (kept_groups.py).
    """


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts that the engine chose at the first N positions of prompt and response, N one less than their tokens:
    the last sampled token was never fed to the model. Made by rollout/routes.py."""

    experts: np.ndarray
    """[N, layers with experts, experts per token] uint8, or int16 with more than 256 experts."""
    is_recorded: np.ndarray
    """[N] bool; False where the engine's choice is not known."""

    def at(self, positions: slice) -> Self:
        return replace(self, experts=self.experts[positions], is_recorded=self.is_recorded[positions])

    def then(self, *others: Self) -> Self:
        """These, and behind them those of positions that follow."""
        parts = (self, *others)
        experts, is_recorded = [one.experts for one in parts], [one.is_recorded for one in parts]
        return replace(self, experts=np.concatenate(experts), is_recorded=np.concatenate(is_recorded))


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent's episode: what the engine was given beyond an earlier turn's tokens, and how many tokens
    it sampled. Example: Turn(parent=0, given_token_ids=[2, 41, 9], num_tokens=1) goes on from the episode's first turn.
    """

    parent: int | None
    """Number of the turn whose prompt and response the engine was given first; None: nothing was given first."""
    given_token_ids: list[int]
    """What it was given after them."""
    num_tokens: int
    """Sampled tokens. They are the next ones in the lists of the rollout."""
    reason: str = "start"
    """Why there is no parent, or one that other turns go on from, too (rollout.agents.token_tree); "" otherwise."""
    given: str = ""
    """The text of given_token_ids, for logs."""
    said: str = ""
    """The text of the sampled tokens, for logs."""
    routes: Routes | None = None
    """From the position of the last token of the parent's response; see Rollout.routes."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response, or an episode of an agent: all responses of its turns, one after the other. All lists have
    one entry per sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    """The engine's log-probability of each token at sampling time (rollout_logprobs)."""
    policy_versions: list[int]
    """Policy version that sampled each token; non-decreasing."""
    text: str
    """What rewards judge: the response, or an episode's last. reward.keep_special_tokens: with special tokens."""
    finish_reason: str
    """"stop" (end of sequence) or "length"; an episode's is that of its last response."""
    num_evictions: int = 0
    """How often a publish ended this response's request because it needed the adapter slot that the request read."""
    routes: Routes | None = None
    """None: the engine was not asked (parity.replay_routing=false), or this is an episode, whose turns have them."""
    turns: tuple[Turn, ...] = ()
    """An episode's requests, in the order in which they were made; empty: one response to the group's prompt."""
    failure: str = ""
    """Why an episode has no reward: one of rollout.agents.failures; "": nothing failed."""
    seconds: float | None = None
    """An episode's duration; None: one response to the group's prompt."""
    teacher_logprobs: list[float] | None = None
    """The teacher's log-probability of each token (algorithm.distill_coef); None: none was asked, or it failed."""

    @property
    def all_routes(self) -> list[tuple[Routes, int]]:
        """The routes of each request, with the number of its sampled tokens."""
        if self.routes is not None:
            return [(self.routes, len(self.token_ids))]
        return [(turn.routes, turn.num_tokens) for turn in self.turns if turn.routes is not None]

    @property
    def num_tokens_without_route(self) -> int:
        """Response tokens that were sampled at a position whose route is missing."""
        return sum(
            int(np.count_nonzero(~routes.is_recorded[len(routes.is_recorded) - num_tokens :]))
            for routes, num_tokens in self.all_routes
        )


NOTHING_YET = Rollout([], [], [], "", ABORTED)
"""A response that was ended before its first token."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one rollout worker has sampled. Times are seconds since 1970, by its machine's clock."""

    at: float
    num_tokens: int
    """Response tokens since its start, those of unfinished responses included."""
    num_finished: int
    """Responses that have ended since its start."""
    first_token_at: float | None
    """When the first of them came; None: not yet."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one rollout is worth. Example: Judgement(0.9, {"math": 1.0, "brevity": -0.5}) with a weight of 0.2."""

    reward: float | None
    """What the advantage is computed from. None if a part failed, and then the sample is left out."""
    parts: dict[str, float | None] = field(default_factory=dict)
    """What each reward gave, before its weight, by its name; None for one that raised or timed out."""
    answer: str | None = None
    """The response's answer, for majority votes; None: the rewards tell none."""


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: the rollouts of one prompt, with their rewards."""

    prompt: Prompt
    rollouts: list[Rollout]
    rewards: list[float | None]
    """One per rollout (Judgement.reward)."""
    parts: list[dict[str, float | None]] = field(default_factory=list)
    """One per rollout (Judgement.parts)."""
    answers: list[str | None] = field(default_factory=list)
    """One per rollout (Judgement.answer); empty: none has one."""

    @property
    def rewards_for_content(self) -> list[float | None]:
        """`rewards` without what lengths took from them (reward.overlong_tokens, reward.length_penalty)."""
        taken = [sum(parts.get(name) or 0.0 for name in SHAPINGS) for parts in self.parts] or [0.0] * len(self.rewards)
        return [
            round(reward - lost, 9) if reward is not None and lost else reward  # 0.9 + 0.1 would not be 0.8 + 0.2
            for reward, lost in zip(self.rewards, taken, strict=True)
        ]

    def staleness_steps(self, policy_version: int) -> int:
        """`policy_version` minus the oldest version in any token of the group; 0 of a group whose episodes all failed
        before their first token."""
        versions = [version for rollout in self.rollouts for version in rollout.policy_versions]
        return policy_version - min(versions, default=policy_version)
