"""What a rollout worker can be asked, declared once: worker.py implements it, calls.py serves it and makes the client.

Owns: names, parameters and results of the verbs. A verb is an async method; it takes and returns plain values,
dataclasses of them, or arrays of NumPy, which travel as msgpack (calls.py). Does not own: the control of a publish,
which trainer ranks send to a socket of its own (weight_sync/replica/messages.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.conf.schema import SamplingConfig
from slipstream.rollout.types import Progress, Prompt, Rollout
from slipstream.weight_sync.replica.recovery import Offer, Pulled


@dataclass(frozen=True, slots=True)
class StartStatus:
    """How far a worker's start has come."""

    phase: str
    """What it is doing."""
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
        prompt: Prompt,
        n: int,
        sampling: SamplingConfig | None = None,
        version: int | None = None,
        so_far: Sequence[Rollout] = (),
    ) -> list[Rollout]:
        """Sample `n` responses to one prompt, by rollout.sampling unless told otherwise, from `version` where it is
        kept. `so_far` is what another worker has sampled of them: the ABORTED ones go on. After hand_over(), responses
        come back as they stand, ABORTED.
        """
        ...

    async def told_to_go(self) -> str:
        """Wait until somebody tells it to go. Returns who did."""
        ...

    async def hand_over(self) -> None:
        """Sample no more: every response under way is returned as it stands."""
        ...

    async def keep_version(self, version: int | None) -> bool:
        """Keep the newest version in its adapter slot; None: no longer. Returns whether it is kept."""
        ...

    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        """Log-probabilities of all tokens but the first, from one prefill at temperature 1; None under another
        version.
        """
        ...

    async def check(self) -> None:
        """Raise if it, or its engine, has ended; the error tells how."""
        ...

    async def progress(self) -> Progress:
        """How many tokens it has sampled."""
        ...

    async def offer(self) -> list[Offer]:
        """What a restarted worker may read here. The last one names the version that is served."""
        ...

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        """Read a peer's weights; serve nothing yet."""
        ...

    async def adopt(self, version: int, epoch: int) -> None:
        """Serve what was pulled."""
        ...

    async def release(self, offers: Sequence[Offer]) -> None:
        """Close the links to the peer."""
        ...

    async def base_wanted_at(self) -> str:
        """Where the trainer must send its base before a version (adapter mode); "" when it needs none."""
        ...


class WorkerVerbs(RolloutVerbs, Protocol):
    """The same, and what whoever starts and ends a worker asks."""

    async def prepare(self) -> None:
        """Do what needs no device, such as imports."""
        ...

    async def start(self) -> str:
        """Start the engine. Returns where its weights are published."""
        ...

    async def start_status(self) -> StartStatus:
        """How far prepare() and start() have come."""
        ...

    async def adapter_endpoint(self) -> str:
        """Where versions of the adapter are published; after start(), with adapter slots."""
        ...

    async def stop(self) -> None:
        """Take no publishes any more, and end the engine."""
        ...
