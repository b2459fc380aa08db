"""A trainer rank's way to the engines: the sources of weights, the link, and the publishers over it.

    weight_sync.mode   what is sent                     where to
    merged             weights with adapters merged in  the workers' endpoints, every version
    adapter            the base, without adapters       the workers' endpoints, once; not sent if it is packed
                       A and B alone                    their adapter endpoints, every version

Invariant: the two publishers of adapter mode share one watermark, so one holds memory at a time.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import SyncMode, WeightSyncConfig
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.errors import LayoutError, TrainerError
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.process_group import ControlGroup
from slipstream.trainer.weights.packed_experts import is_packed
from slipstream.trainer.weights.quantization import BlockFp8
from slipstream.weight_sync.disk.kept_source import KeptSource
from slipstream.weight_sync.errors import ReplicaError
from slipstream.weight_sync.gc_freeze import freeze_heap
from slipstream.weight_sync.merging.factors import Merge
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.transport.base import Transport

logger = logging.getLogger(__name__)


class Delivery:
    """See the module's docstring. `merges` are the whole model's, if engines merge for themselves."""

    def __init__(
        self,
        decoder: Decoder,
        control: ControlGroup,
        config: WeightSyncConfig,
        quantization: BlockFp8 | None,
        *,
        key: bytes,
        host: str,
        merges: Sequence[Merge] = (),
    ) -> None:
        self._control = control
        self._rank = control.rank
        self._config = config
        self._key = key
        self._host = host
        self._device = decoder.layout.device
        self._publisher: Publisher | None = None
        self._transport: Transport | None = None
        self.base_source: TrainerWeightSource | None = None
        self.source: TrainerWeightSource | AdapterSource | None = None
        """What every version is read from; None if nothing can be published."""
        self._merged_from: TrainerWeightSource | None = None
        """What engines that merge for themselves merge from."""
        if config.mode is SyncMode.adapter and decoder.lora is not None:
            if not is_packed(decoder):
                self.base_source = TrainerWeightSource(decoder, self._rank, quantization, is_merged=False)
            self.source = AdapterSource(decoder, self._rank, decoder.lora)
        elif not is_packed(decoder):  # fine-tuning publishes nothing
            keeps_last = config.delta_bytes > 0 and quantization is None  # scales are those of all values of a block
            self.source = TrainerWeightSource(decoder, self._rank, quantization, keeps_last=keeps_last, merges=merges)
            if merges:
                self._merged_from = TrainerWeightSource(decoder, self._rank, is_merged=False, merges=merges)

    def connect(
        self,
        endpoints: list[str],
        transport: Transport | None = None,
        adapter_endpoints: Sequence[str] = (),
        absent: Sequence[int] | None = None,
    ) -> JsonObject:
        """Meet the rollout workers at these ZMQ endpoints and build the transfer plan. Returns its summary.

        Args:
            transport: by default Mooncake's, as weight_sync.transport asks.
            adapter_endpoints: endpoints of the same workers' adapter slots. With weight_sync.mode=adapter, this call
                sends the frozen base to `endpoints` once (unless it is packed), and publish() writes to these.
            absent: given if other ranks, which have died, were connected before: workers have their base, and these of
                them are out of service (see Publisher.connect).

        Raises ReplicaError if a worker did not take the base.
        """
        if self.source is None:
            raise LayoutError(
                f"rank {self._rank}: packed experts cannot be written into engines; set weight_sync.mode=adapter"
            )
        self._control.agree("endpoints", (endpoints, list(adapter_endpoints)))
        self._transport = transport or self._open_link()
        if self.base_source is not None and absent is None:
            self._send_base(endpoints)
        self._publisher = self._make_publisher(self.source, self._transport)
        summary = self._publisher.connect(list(adapter_endpoints) or endpoints, absent)
        freeze_heap()  # the plan lives as long as this process does
        return asdict(summary)

    def publish(self, version: int, *, exclude: Sequence[int] = (), trace: Path | None = None) -> PublishReport:
        """Write `version` into every connected engine but those excluded (see Publisher.publish)."""
        if self._publisher is None:
            raise TrainerError(f"rank {self._rank}: publish() before connect()")
        report = self._publisher.publish(version, exclude=exclude, trace=trace)
        if isinstance(self.source, TrainerWeightSource):
            report = replace(
                report, update_error=self.source.update_error(), changed_fraction=self.source.changed_fraction()
            )
        return report

    def disconnect(self, replicas: Sequence[int]) -> None:
        """See Publisher.disconnect."""
        if self._publisher is not None:
            self._publisher.disconnect(replicas)

    def reconnect(self, replica: int, endpoint: str, base_endpoint: str = "") -> None:
        """Meet an engine that was started again (see Publisher.reconnect).

        Args:
            endpoint: its endpoint; with adapter slots, that of its slots.
            base_endpoint: where to send the base first; "" if the engine got it from a peer or needs none.
        """
        if self._publisher is None:
            raise TrainerError(f"rank {self._rank}: reconnect() before connect()")
        if base_endpoint:
            self._publisher.release()  # the two share one watermark
            self._send_base([base_endpoint])
        self._publisher.reconnect(replica, endpoint)

    def close(self) -> None:
        """Leave the link. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _send_base(self, endpoints: list[str]) -> None:
        """Send the frozen base. It is version 0 of every engine's own weights and never changes."""
        if self.base_source is None or self._transport is None:
            raise TrainerError(f"rank {self._rank}: engines take no base apart from adapters in this run")
        publisher = self._make_publisher(self.base_source, self._transport)
        try:
            publisher.connect(endpoints)
            report = publisher.publish(0)
        finally:
            publisher.close()
        failed = [f"{replica.endpoint}: {replica.error}" for replica in report.replicas if not replica.committed]
        if failed:
            raise ReplicaError(f"the base weights did not reach every engine: {'; '.join(failed)}")
        logger.info("base weights sent: %d bytes in %.2f s", report.num_bytes, report.total_s)

    def _open_link(self) -> Transport:
        from slipstream.weight_sync.transport.mooncake import MooncakeTransport  # fine-tuning needs no Mooncake

        return MooncakeTransport(
            self._config.transport, device=self._device.type, host=self._host, timeout_s=self._config.timeout_s
        )

    def _make_publisher(self, source: TrainerWeightSource | AdapterSource, transport: Transport) -> Publisher:
        config, device = self._config, self._device
        is_kept = config.delta_bytes > 0 and isinstance(source, TrainerWeightSource) and not source.knows_last
        return Publisher(
            KeptSource(source, config.watermark_bytes, device) if is_kept else source,
            transport,
            rank=self._rank,
            world_size=self._control.world_size,
            group=self._control.group,
            config=config,
            key=self._key,
            device=device,
            base=self._merged_from,
        )
