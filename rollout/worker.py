"""One rollout worker: an engine that samples groups, and its side of a publish. No Ray.

Owns: when the engine may sample (only while every rank holds one committed version), its start and its end, seeds, and
text. Does not own the steps of a publish and of a recovery (base_replica.py).
Invariant: generate_group() starts requests only in phase CLEAN; tokens are stamped with the version that sampled them.

With adapter slots, those steps move the base weights, and adapter_replica.py moves the versions of the adapter: pull()
then also reads the peer's newest version into a slot, and adopt(v) puts that slot in service. A base that the engine
loaded from disk is CLEAN from the start and is never written, offered or asked for.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from slipstream.conf.failures import undone_by
from slipstream.conf.schema import EvalSampling, PauseMode, SamplingConfig
from slipstream.rollout.adapters.adapter_replica import AdapterReplica
from slipstream.rollout.base_replica import BaseReplica
from slipstream.rollout.continuation import go_on_together
from slipstream.rollout.engine.engine import Engine, is_gone
from slipstream.rollout.errors import EngineError, ReplicaNotServing, TokenizerError
from slipstream.rollout.kept_groups import KeptGroups
from slipstream.rollout.layouts.offline_layout import ExpectedLayouts
from slipstream.rollout.text.plain_text import TOKENIZER_FILE, load_tokenizer
from slipstream.rollout.types import (
    ABORTED,
    NOTHING_YET,
    PROBE,
    Adapter,
    AdapterSlotsSpec,
    EngineOptions,
    Progress,
    Prompt,
    Rollout,
    WorkerOptions,
)
from slipstream.rollout.worker_verbs import EngineConnection, StartStatus, WorkerVerbs, digest_of
from slipstream.weight_sync.errors import PlanMismatch
from slipstream.weight_sync.gc_freeze import freeze_heap
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.record.layout_wire import layouts_digest
from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint
from slipstream.weight_sync.replica.messages import EngineRank
from slipstream.weight_sync.replica.recovery import Offer, Pulled
from slipstream.weight_sync.replica.version_state import Phase, VersionState
from slipstream.weight_sync.typed_msgpack import pack, unpack

logger = logging.getLogger(__name__)


class RolloutWorker(WorkerVerbs):
    """See the module's docstring, and WorkerVerbs for what its verbs promise. All methods belong to one event loop.

    Args:
        seed: Seed of this worker's sampling; another one for every worker.
        host: Address at which trainer ranks reach this worker.

    Raises EngineError if the folder has no tokenizer.json, or it is damaged.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        seed: int,
        host: str = "127.0.0.1",
        make_engine: Callable[[EngineOptions, int], Engine],
    ) -> None:
        self._tokenizer = _read_tokenizer(options.folder)
        self._options = options
        self._layouts = ExpectedLayouts(options)
        self._host = host
        self.adapter_replica: AdapterReplica | None = None
        self._adapter_endpoint: ReplicaEndpoint | None = None
        self._sockets = contextlib.ExitStack()
        self.engine = make_engine(options, seed)
        self.base = BaseReplica(self.engine, options.weight_sync, options.key, host)
        self.kept = KeptGroups(options.num_versions_kept, self._newest)
        self._is_going = False
        self._told = asyncio.Event()
        self._told_by = ""
        self.started_at: dict[str, float] = {}
        """How far the start has come, and when, in seconds since 1970: imported, engine_up, layout_known, up."""

    # -- for the controller ------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        await self.engine.prepare()
        self._reached("imported")

    async def start(self) -> str:
        adapters, own_merge = self._options.adapters, self._options.own_merge
        base = None if adapters is None else adapters.base
        if base is not None and not base.is_dir():
            raise EngineError(f"model.path={base}: no such folder on this machine, whose engine must load it (INT4)")
        if "imported" not in self.started_at:
            await self.prepare()
        await self.engine.start()
        self._reached("engine_up")
        with undone_by(lambda _: self._end_start()):
            link = str(self.base.config.transport), self._host, self.base.config.timeout_s
            if base is not None:
                await self.engine.call_ranks("slipstream_open_link", *link)
                self.base.endpoint.adopt(VersionState(Phase.clean, 0))  # the engine loaded it, and it never changes
            else:
                merging = b"" if own_merge is None else pack(own_merge)
                given = self._layouts.digests(), self.base.config.delta_bytes, merging
                tensors = _sent(self._options.tensors)
                replies = await self.engine.call_ranks("slipstream_describe", tensors, *link, *given)
                self.base.ranks = [unpack(EngineRank, reply) for reply in replies]
                if own_merge is None:  # otherwise factors are in the layouts, too
                    self._layouts.keep([layouts_digest((rank.layout,)) for rank in self.base.ranks])
            if adapters is not None:
                await self._open_slots(adapters)
            self._reached("layout_known")
            await self.engine.warm_up(None if adapters is None else Adapter(0, PROBE, "warm-up"))
            freeze_heap()
            num_ranks = len(self.base.ranks) if self.adapter_replica is None else self.adapter_replica.num_ranks
            logger.info("the engine is up: %d ranks, %d KV blocks", num_ranks, self.engine.num_kv_blocks)
            address = await self.base.endpoint.start()
            self._reached("up")
            return address

    def _end_start(self) -> None:
        self._sockets.close()
        self.engine.shutdown()

    async def start_status(self) -> StartStatus:
        phase = "warming up prefills" if "layout_known" in self.started_at else "recording the layout"
        if "engine_up" not in self.started_at:
            phase = self.engine.start_phase
        children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        return StartStatus(phase, self.started_at, [os.getpid(), *children])

    async def check(self) -> None:
        self.engine.check()

    def _reached(self, event: str) -> None:
        self.started_at[event] = time.time()

    async def _open_slots(self, adapters: AdapterSlotsSpec) -> None:
        key = self._options.key
        replies = await self.engine.call_ranks("slipstream_open_slots", _sent(adapters.tensors), key)
        opened = [unpack(tuple[str, EngineRank], reply) for reply in replies]
        asked = [EngineConnection(address, key) for address, _ in opened]
        for connection in asked:
            self._sockets.callback(connection.close)
        ranks = [rank for _, rank in opened]
        self.adapter_replica = AdapterReplica(
            self.engine, ranks, asked, adapters.num_slots, self.base.config, has_base=lambda: self.state.is_serving
        )
        self._adapter_endpoint = ReplicaEndpoint(self.adapter_replica, key, host=self._host, pauses=False)
        await self._adapter_endpoint.start()

    async def adapter_endpoint(self) -> str:
        if self._adapter_endpoint is None:
            raise EngineError("this rollout worker has no adapter slots")
        return self._adapter_endpoint.address

    @property
    def state(self) -> VersionState:
        """Which version the engine's own weights hold; this worker samples if it `is_serving`."""
        return self.base.state

    def endpoint(self) -> str:
        return self.base.endpoint.address

    async def generate_group(
        self,
        prompt: Prompt,
        n: int,
        sampling: SamplingConfig | None = None,
        version: int | None = None,
        so_far: Sequence[Rollout] = (),
        *,
        seed: int | None = None,
    ) -> list[Rollout]:
        """Args: `seed` makes it repeatable; None: sampling.seed, or the engine's own numbers."""
        if not self.state.is_serving:
            raise ReplicaNotServing(
                f"this rollout worker is {self.state.phase} (version {self.state.version}, epoch {self.state.epoch})"
                ": it samples only from a committed version"
            )
        if self._is_going:
            return list(so_far) or [NOTHING_YET] * n
        chosen = sampling or self._options.config.sampling
        own_seed = chosen.seed if seed is None else seed

        async def sample() -> list[Rollout]:
            if self.adapter_replica is None:
                rollouts = await self._sample(prompt, n, chosen, so_far, own_seed)
            else:
                given = {"seed": own_seed, "version": version, "so_far": so_far}
                rollouts = await self.adapter_replica.sample(prompt.token_ids, n, chosen, **given)
            return [replace(rollout, text=self._decode(rollout)) for rollout in rollouts]

        if so_far or version is not None or isinstance(sampling, EvalSampling):
            return await sample()
        return await self.kept.sample(digest_of(prompt, n, sampling), sample)

    async def _sample(
        self, prompt: Prompt, n: int, sampling: SamplingConfig, so_far: Sequence[Rollout], seed: int | None
    ) -> list[Rollout]:
        while True:
            if so_far:
                rollouts = await go_on_together(prompt.token_ids, so_far, sampling, seed, self.engine.generate_group)
            else:
                rollouts = await self.engine.generate_group(prompt.token_ids, n, sampling, seed=seed)
            was_ended = any(rollout.finish_reason == ABORTED for rollout in rollouts)
            if not was_ended or self._is_going or is_gone(self.engine):
                return rollouts
            if self.base.config.requests_in_flight is not PauseMode.abort:
                raise EngineError(
                    f"the engine aborted requests of prompt {prompt.prompt_id} although nobody asked it to"
                )
            # pause_mode=abort ended the group. Siblings should have one version, so all of them start anew.
            so_far = ()
            await self.base.serving.wait()

    def _newest(self) -> int:
        """The version that new requests sample from."""
        return self.engine.version if self.adapter_replica is None else self.adapter_replica.version

    async def groups_left(self) -> list[bytes]:
        return self.kept.left()

    def tell_to_go(self, who: str) -> None:
        """Let told_to_go() return."""
        self._told_by = who
        self._told.set()

    async def told_to_go(self) -> str:
        await self._told.wait()
        return self._told_by

    async def hand_over(self) -> None:
        self._is_going = True
        if self.adapter_replica is not None:
            self.adapter_replica.is_going = True
        await self.engine.abort_all()

    async def keep_version(self, version: int | None) -> bool:
        return self.adapter_replica is not None and self.adapter_replica.keep(version)

    async def progress(self) -> Progress:
        engine = self.engine
        return Progress(time.time(), engine.num_generated_tokens, engine.num_finished_responses, engine.first_token_at)

    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        if self.adapter_replica is not None:
            return await self.adapter_replica.score(token_ids, version)
        if not self.state.is_serving or self.engine.version != version:
            return None
        logprobs = await self.engine.score(token_ids)
        return logprobs if self.engine.version == version else None

    async def offer(self) -> list[Offer]:
        if not self.state.is_serving:
            raise ReplicaNotServing(f"this rollout worker is {self.state.phase}: it has no committed version to give")
        offers = await self.base.offer()
        return offers if self.adapter_replica is None else [*offers, *await self.adapter_replica.offer()]

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        weights, slots = offers[: len(self.base.ranks)], offers[len(self.base.ranks) :]
        num_slots = 0 if self.adapter_replica is None else self.adapter_replica.num_ranks
        if (len(weights), len(slots)) != (len(self.base.ranks), num_slots):
            raise PlanMismatch(
                f"this engine reads {len(self.base.ranks)} ranks' weights and {num_slots} ranks' adapter slots; its "
                f"peer makes {len(offers)} offers"
            )
        if self.adapter_replica is None:
            return await self.base.pull(weights)
        if not weights or self.state.is_serving:  # it loaded its base itself, or has read it before: it never changes
            return await self.adapter_replica.pull(slots)
        pulled = await self.base.pull(weights)
        await self.base.adopt(weights[0].version, weights[0].epoch)
        return pulled.then(await self.adapter_replica.pull(slots))

    async def adopt(self, version: int, epoch: int) -> None:
        await (self.adapter_replica or self.base).adopt(version, epoch)

    async def release(self, offers: Sequence[Offer]) -> None:
        if self.adapter_replica is None:
            await self.base.release(offers)
        else:
            await self.adapter_replica.release(offers[len(self.base.ranks) :])

    async def base_wanted_at(self) -> str:
        return "" if self.adapter_replica is None or self.state.is_serving else self.base.endpoint.address

    async def stop(self) -> None:
        self.kept.close()
        await self.base.close()
        if self._adapter_endpoint is not None:
            await self._adapter_endpoint.close()
        self._sockets.close()
        await asyncio.to_thread(self.engine.shutdown)

    def _decode(self, rollout: Rollout) -> str:
        skip = not self._options.keep_special_tokens
        return self._tokenizer.decode(rollout.token_ids, skip_special_tokens=skip)


def _sent(tensors: Sequence[TensorMeta]) -> list[tuple[str, list[int], str]]:
    return [(meta.name, list(meta.shape), meta.dtype) for meta in tensors]


def _read_tokenizer(folder: Path) -> Tokenizer:
    """Without one, rewards would judge empty texts."""
    try:
        return load_tokenizer(folder)
    except TokenizerError as e:
        raise EngineError(f"no response can be made text: {folder / TOKENIZER_FILE} cannot be read: {e}") from e
