"""One publish: the trainer's policy version goes to every replica that takes part.

    supervisor.hold --> trainer.reconnect, for each restarted worker --> trainer.publish, or relay --> supervisor.settle

Owns: the order of these calls, their deadlines, and the names of timelines. Does not own: when to publish (controller),
who takes part and who serves afterwards (supervisor), the writes (trainer), who reads from whom (relay).
Invariant: what fails on one replica takes out that replica alone. Only a lost trainer raises.
"""

import logging
from collections.abc import Sequence

from slipstream.conf.schema import Relay, SyncMode, WeightSyncConfig
from slipstream.fleet.relay import publish_by_relay
from slipstream.fleet.replicas import Replica
from slipstream.orchestrator.loop.ports import LoopServices
from slipstream.weight_sync.errors import WeightSyncError
from slipstream.weight_sync.publish.report import PublishReport

logger = logging.getLogger(__name__)

RAY_CALL_S = 10.0
"""What a call to a healthy worker may take beside its work."""
_TRAINER_LOST_S = 60.0
"""What a call to a healthy trainer may take beside its work."""


class Publication:
    def __init__(self, config: WeightSyncConfig, services: LoopServices, policy_version: int) -> None:
        self._config = config
        self._supervisor = services.supervisor
        self._trainer = services.trainer
        self._traces = services.traces
        self._policy_version = policy_version
        # Every replica has its own deadline inside the publish; this one only notices a trainer that is lost.
        self._timeout_s = 2 * config.timeout_s + _TRAINER_LOST_S

    async def run(self) -> PublishReport:
        """Publish, and return what became of every replica. A replica that fails is restarted, or out of service."""
        supervisor, config = self._supervisor, self._config
        held = await supervisor.hold(pauses=config.mode is not SyncMode.adapter)
        logger.debug("publish of version %d begins", self._policy_version)
        exclude = held.exclude + [replica.place for replica in held.joining if not await self._joins(replica)]
        if config.relay is Relay.node:
            report = await publish_by_relay(self._write, supervisor)
        else:
            report = await self._write(exclude)
        await supervisor.settle(report.replicas)
        logger.debug(
            "publish of version %d ended after %.3f s: %d of %d replicas committed",
            self._policy_version, report.total_s, report.num_committed, len(report.replicas),
        )  # fmt: skip
        return report

    async def _joins(self, replica: Replica) -> bool:
        """Let the trainer meet a restarted worker, whose address is another one now."""
        # A replica without a base needs a publish of its base as well, and three more replies.
        timeout_s = self._timeout_s + 3 * self._config.timeout_s * bool(replica.base_wanted_at)
        try:
            await self._trainer.reconnect(replica.place, replica.worker.endpoint, timeout_s, replica.base_wanted_at)
        except WeightSyncError as error:
            await self._supervisor.fail(replica, f"{type(error).__name__}: {error}", told_by_others=True)
            return False
        replica.is_known = True
        return True

    async def _write(self, exclude: Sequence[int], number: int = 0) -> PublishReport:
        """The trainer writes to all replicas but these. A relay may write several times; `number` counts them."""
        every, version = self._config.trace_every_steps, self._policy_version
        name = f"publish-{version:06d}-round{number}.json" if number else f"publish-{version:06d}.json"
        trace = self._traces / name if every > 0 and version % every == 0 else None
        return await self._trainer.publish(timeout_s=self._timeout_s, exclude=exclude, trace=trace)
