"""An engine that only notes what it is asked, in which order, and checks what a rollout worker must respect."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from slipstream.conf.schema import PauseMode, SamplingConfig
from slipstream.rollout.errors import EngineDied
from slipstream.rollout.types import Rollout
from slipstream.weight_sync.errors import IntegrityError
from slipstream.weight_sync.layout import Binding, DestLayout, Param
from slipstream.weight_sync.replica.messages import Bound, EngineRank
from slipstream.weight_sync.replica.recovery import Offer, Pulled
from slipstream.weight_sync.typed_msgpack import Sent, pack

BINDING = Binding("session", {"w": 4096})
OFFER = Offer(3, 7, "digest", "layout", "tcp", BINDING, {"w": (1 << 64) - 1})
DESCRIBED = EngineRank(Sent(DestLayout(0, (Param("w", (2,), "float32"),), ())), BINDING, "tcp")
REPLIES = {
    "slipstream_describe": pack(DESCRIBED),
    "slipstream_begin": pack(Bound(BINDING.session)),
    "slipstream_open_slots": pack(("tcp://127.0.0.1:1", DESCRIBED)),
    "slipstream_offer": pack(OFFER),
    "slipstream_pull": pack(Pulled(100, 0.5, 0.25)),
}
"""What a rank of an engine answers."""


class ModelEngine:
    """What a worker must respect in an engine of two ranks; each breach is an assertion error.

    Fails `failing` on its second rank; answers when `gate` is open, as `finish_reasons` say.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_prepared = False
        self.is_alive = False
        self.is_killed = False
        self.is_running = True
        self.is_written = False
        """Whether the bytes of its weights may change."""
        self.has_old_blocks = True
        """Whether KV blocks of other weights than the present ones are there."""
        self.version = -1
        self.pause_modes: list[PauseMode] = []
        self.ranks_did: list[str] = []
        """Calls to its ranks."""
        self.known_layouts: list[str] | None = None
        """Digests that its ranks were given."""
        self.requests: list[tuple[int, int]] = []
        """Siblings and max_tokens of each."""
        self.asked: list[tuple[list[int], int | None]] = []
        """Prompt and seed of each."""
        self.token_ids = [7]
        self.failing = ""
        self.finish_reasons: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cleared = asyncio.Event()
        self.cleared.set()
        self.num_kv_blocks = 7
        self.while_it_scores: Callable[[], Awaitable[None]] | None = None

    async def prepare(self) -> None:
        self.is_prepared = True

    async def start(self) -> None:
        assert self.is_prepared
        self.is_alive = True

    async def warm_up(self, adapter: object = None) -> None:
        assert self.is_alive

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        if self.while_it_scores is not None:
            await self.while_it_scores()
        return [-1.0] * (len(token_ids) - 1)

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        self.is_running = False
        self.pause_modes.append(mode)

    async def clear_cache(self, *, timeout_s: float) -> None:
        assert not self.is_running
        await self.cleared.wait()
        self.has_old_blocks = False

    async def resume(self, *, timeout_s: float) -> None:
        assert not self.is_written, "it would sample from a mixture"
        self.is_running = True

    async def set_version(self, version: int) -> None:
        assert not self.is_running, "a token of other weights would carry this version"
        self.version = version

    async def call_ranks(self, method: str, *given: Any, timeout_s: float = 0.0) -> list[Any]:
        self.ranks_did.append(method)
        if method == "slipstream_describe":
            self.known_layouts, self.landing_bytes, _ = given[-3:]
        if method in ("slipstream_begin", "slipstream_pull"):
            assert not self.is_running, "it would sample from a mixture"
            self.is_written = True
        if method == self.failing:
            raise IntegrityError("rank 1: w does not hold what was sent")
        if method in ("slipstream_commit", "slipstream_adopt"):
            self.is_written = False
        return [REPLIES.get(method, pack(None))] * 2

    async def generate_group(
        self, prompt_token_ids: Any, n: int, sampling: SamplingConfig, *, seed: int | None
    ) -> list[Rollout]:
        assert self.is_running and not self.is_written
        self.requests.append((n, sampling.max_tokens))
        self.asked.append((list(prompt_token_ids), seed))
        await self.gate.wait()
        reason = self.finish_reasons.pop(0) if self.finish_reasons else "stop"
        return [
            Rollout(
                list(self.token_ids), [-1.0] * len(self.token_ids), [self.version] * len(self.token_ids), "", reason
            )
            for _ in range(n)
        ]

    def check(self) -> None:
        if self.is_killed:
            raise EngineDied("the engine's process was ended by SIGKILL")

    async def abort_all(self) -> None:
        self.finish_reasons = ["abort"] * 9
        self.gate.set()

    def shutdown(self) -> None:
        self.is_alive = False
