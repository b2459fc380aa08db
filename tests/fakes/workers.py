"""A rollout worker that answers at once with what it has committed."""

import asyncio
from collections.abc import Mapping, Sequence

from fakes.world import Watched, World
from slipstream.conf.schema import SamplingConfig
from slipstream.rollout.types import ABORTED, Progress, Prompt, Rollout
from slipstream.weight_sync.layout import Binding
from slipstream.weight_sync.replica.recovery import Offer, Pulled


def an_offer(version: int, epoch: int = 1) -> Offer:
    """What a worker of that version lets a peer read: no parameter at all."""
    return Offer(version, epoch, plan="plan", layout="layout", link="tcp", binding=Binding("session", {}), hashes={})


class FakeWorker(Watched):
    """Answers with the version it has committed; every second sibling is right."""

    def __init__(self, world: World, index: int) -> None:
        super().__init__()
        self.world = world
        self.index = index
        self.name = f"rollout-{index}"
        self.endpoint = f"tcp://{self.name}"
        self.node = "one"
        self.pid = 1000 + index
        self.started_at: Mapping[str, float] = {"process_up": 1.0, "up": 3.0}
        self.progress_made = Progress(10.0, 0, 0, None)
        self.fails_after: int | None = None
        """Number of groups after which it dies."""
        self.gate: asyncio.Event | None = None
        self.num_groups = 0
        self.wants_base_at = ""
        self.death = ""
        """How its process has ended."""
        self.scores_fail = False
        self.told, self.who_told = asyncio.Event(), "SIGTERM"
        self.is_going = False
        """Hands over: the first of two tokens was sampled."""
        self.num_done = 0
        """... but for so many responses, which have both."""
        self.groups_kept: list[bytes] = []
        """For a controller that is gone."""

    async def keep_version(self, version: int | None) -> bool:
        return False

    async def groups_left(self) -> list[bytes]:
        await self._reached("groups_left")
        return self.groups_kept

    async def told_to_go(self) -> str:
        await self.told.wait()
        return self.who_told

    async def hand_over(self) -> None:
        await self._reached("hand_over")
        self.is_going = True
        if self.gate is not None:
            self.gate.set()

    async def generate_group(
        self,
        prompt: Prompt,
        n: int,
        sampling: SamplingConfig | None = None,
        version: int | None = None,
        so_far: Sequence[Rollout] = (),
    ) -> list[Rollout]:
        await self._reached("generate_group")
        if self.fails_after is not None and self.num_groups >= self.fails_after:
            raise ConnectionError(f"{self.name} died")
        self.num_groups += 1
        version = self.world.committed[self.index]
        self.world.diary.append(("sample", prompt.prompt_id, version))
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.is_going:
            begun = [Rollout([5], [-1.0], [version], "", ABORTED)] * (n - self.num_done)
            return [Rollout([5, 2], [-1.0, -0.5], [version] * 2, "done", "stop")] * self.num_done + begun
        begun = [one.policy_versions for one in so_far] or [[]] * n
        texts = ["right" if i % 2 else "wrong" for i in range(n)]
        return [
            Rollout([5, 2], [-1.0, -0.5], [*versions, version, version][:2], text, "stop")
            for versions, text in zip(begun, texts, strict=True)
        ]

    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        """Half a nat above what it sampled with, [5, 2] at -1.0 and -0.5."""
        self.world.scored.append((version, list(token_ids)))
        if self.scores_fail:
            raise ConnectionError(f"{self.name} died")
        return None if version != self.world.committed[self.index] else [0.0] * (len(token_ids) - 3) + [-0.5, 0.0]

    async def check(self) -> None:
        if self.death:
            raise ConnectionError(self.death)

    async def progress(self) -> Progress:
        await self._reached("progress")
        return self.progress_made

    async def offer(self) -> list[Offer]:
        await self._reached("offer")
        return [an_offer(self.world.committed[self.index])]

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        await self._reached("pull")
        self.world.diary.append(("pull", self.index, offers[0].version))
        return Pulled(num_bytes=10, read_s=0.5, verify_s=0.1)

    async def adopt(self, version: int, epoch: int) -> None:
        await self._reached("adopt")
        self.world.committed[self.index] = version

    async def release(self, offers: Sequence[Offer]) -> None:
        await self._reached("release")
        self.world.diary.append(("release", self.index))

    async def base_wanted_at(self) -> str:
        await self._reached("base_wanted_at")
        return self.wants_base_at
