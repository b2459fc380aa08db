"""What a rollout worker can be asked, declared once: worker.py implements it, a CallServer serves it, and the client is
made from it.

Owns: names, parameters and results of the verbs, and what travels in the place of a prompt and of sampling options. A
verb is an async method of plain values, dataclasses of them, or arrays of NumPy (weight_sync/calls). Does not own: what
trainer ranks ask at a publish, on a socket of its own (weight_sync/replica/messages.py).
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, Self

import msgspec

from slipstream.conf.schema import EvalSampling, SamplingConfig
from slipstream.rollout.errors import EngineDied, EngineError
from slipstream.rollout.types import Progress, Prompt, Rollout
from slipstream.weight_sync.calls.connection import Connection, calls
from slipstream.weight_sync.replica.recovery import Offer, Pulled
from slipstream.weight_sync.typed_msgpack import pack


class SentPrompt(msgspec.Struct, array_like=True):
    """What a worker needs of a prompt: a row's other columns may be anything."""

    prompt_id: int
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        return cls(prompt.prompt_id, prompt.token_ids)

    def value(self) -> Prompt:
        return Prompt(self.prompt_id, self.token_ids, "")


class SentSampling(msgspec.Struct, array_like=True):
    """Sampling options of one kind, or none."""

    training: SamplingConfig | None
    evaluation: EvalSampling | None

    @classmethod
    def of(cls, sampling: SamplingConfig | None) -> Self:
        return cls(None, sampling) if isinstance(sampling, EvalSampling) else cls(sampling, None)

    def value(self) -> SamplingConfig | None:
        return self.evaluation or self.training


def digest_of(prompt: Prompt, n: int, sampling: SamplingConfig | None) -> bytes:
    """What is asked for, in 16 bytes: equal ones for equal requests."""
    sent = pack((SentPrompt.of(prompt), n, SentSampling.of(sampling)))
    return hashlib.blake2b(sent, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class StartStatus:
    phase: str
    reached: dict[str, float]
    """Event (imported, engine_up, layout_known, up) -> when, in seconds since 1970."""
    pids: list[int]
    """The worker's process, and those that it has started or asked for: its engine's."""


NOTICE = "a notice that its machine is taken away"
"""What told_to_go() returns of a worker that must not start again on its machine."""


class RolloutVerbs(Protocol):
    """What a run asks of a worker that is up."""

    async def generate_group(
        self,
        prompt: Annotated[Prompt, SentPrompt],
        n: int,
        sampling: Annotated[SamplingConfig | None, SentSampling] = None,
        version: int | None = None,
        so_far: Sequence[Rollout] = (),
    ) -> list[Rollout]:
        """Sample `n` responses to one prompt, by rollout.sampling unless told otherwise. A publish meanwhile freezes
        and resumes them or, depending on the pause mode, starts them anew. After hand_over(), and when the engine's
        process has ended meanwhile, they come back as they stand, ABORTED.

        Args:
            version: With adapter slots, the version to sample from, if keep_version() keeps it. Otherwise, and without
                slots, the newest one samples.
            so_far: What another worker has sampled of them: the ABORTED ones go on.

        Raises:
            ReplicaNotServing: The weights are not of one committed version right now. Nothing was sampled.
            EngineError: The engine refused or failed the request.
        """
        ...

    async def groups_left(self) -> list[bytes]:
        """What a controller that is gone had asked for (digest_of), and generate_group() need not sample again."""
        ...

    async def told_to_go(self) -> str:
        """Wait until somebody tells it to go. Returns who did."""
        ...

    async def hand_over(self) -> None:
        """Sample no more: every response under way is returned as it stands, and a later one at once."""
        ...

    async def keep_version(self, version: int | None) -> bool:
        """Keep the newest version in its adapter slot while others are published; None: no longer. Returns whether it
        is kept: false without slots, whose weights a publish overwrites, and if another one is newer."""
        ...

    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        """Log-probabilities of all tokens but the first, from one prefill at temperature 1; None if the engine holds
        another version, or took one meanwhile."""
        ...

    async def check(self) -> None:
        """Raise if it, or its engine, has ended; the error tells how."""
        ...

    async def progress(self) -> Progress:
        """How many tokens it has sampled."""
        ...

    async def offer(self) -> list[Offer]:
        """What every rank lets the same rank of a restarted worker read: first all ranks' weights, then, with adapter
        slots, all ranks' slots of the newest version. The last one names the version that is served. Raises
        ReplicaNotServing if there is no committed version here right now."""
        ...

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        """Read a peer's weights; serve nothing before adopt(). Returns bytes of all ranks, seconds of the slowest.
        Raises WeightSyncError if layouts differ, or bytes did not arrive or are not the peer's. This worker is DIRTY
        then, and needs a publish."""
        ...

    async def adopt(self, version: int, epoch: int) -> None:
        """Serve what was pulled, by the last offer. The caller has checked that the peer has not moved on meanwhile."""
        ...

    async def release(self, offers: Sequence[Offer]) -> None:
        """Close the links to the peer. Without adapter slots, this stops sampling for about a second."""
        ...

    async def base_wanted_at(self) -> str:
        """Where the trainer must send its base before a version (adapter mode); "" when it needs none."""
        ...


class WorkerVerbs(RolloutVerbs, Protocol):
    """All verbs: those above, and those of whoever starts and ends a worker."""

    async def prepare(self) -> None:
        """Do what needs no device, such as imports. A worker that takes the place of a dead one does it while that one
        is cleared away. Without it, start() does it."""
        ...

    async def start(self) -> str:
        """Start the engine, record its layout, open the control endpoint. Returns its address, for Publisher.connect().
        Raises EngineError if the engine did not come up, lacks the base that it must load, or stores a parameter in a
        form that cannot be published; WeightSyncError if the layout cannot be recorded, or the link not be opened."""
        ...

    async def start_status(self) -> StartStatus:
        """How far prepare() and start() have come."""
        ...

    async def adapter_endpoint(self) -> str:
        """Where versions of the adapter are published; after start(), with adapter slots."""
        ...

    async def stop(self) -> None:
        """Take no publishes any more, and end the engine. Idempotent."""
        ...


class EngineConnection(Connection):
    """A connection to a worker, or to one of its engine's ranks."""

    failed, gone = EngineError, EngineDied


@calls(WorkerVerbs)
class WorkerClient(WorkerVerbs):
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @classmethod
    def at(cls, address: str, key: bytes, ended: asyncio.Future[None] | None = None) -> Self:
        """Connect (see Connection)."""
        return cls(EngineConnection(address, key, ended))
