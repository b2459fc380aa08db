"""Section `weight_sync`: what a publish carries, over which link, within what bounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from conf.schema.rules import above, at_least, require


class SyncMode(StrEnum):
    """What a publish carries: whole weights with the adapter merged in, or the adapter alone, into a slot."""

    merged = "merged"
    adapter = "adapter"


class BusySlot(StrEnum):
    """What a publish does when requests of older versions read every adapter slot: wait for them, sample them anew
    under the newest version (a group twice at most; then it goes on), or go on with what they have so far under the
    newest version.
    """

    wait = "wait"
    requeue = "requeue"
    re_prefill = "re_prefill"


class TransportKind(StrEnum):
    """Link that carries the weights. `auto` takes nvlink when both ends are GPUs of this host, rdma when a NIC is
    found, else tcp.
    """

    auto = "auto"
    tcp = "tcp"
    nvlink = "nvlink"
    rdma = "rdma"


class PauseMode(StrEnum):
    """What happens to requests in flight while weights change: frozen and continued, drained first, or aborted."""

    keep = "keep"
    wait = "wait"
    abort = "abort"


class Relay(StrEnum):
    """Who sends a version to a replica: the trainer to every one, or to one a node, which the node's others read."""

    none = "none"
    node = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    """The path of new weights from trainer ranks into live engines."""

    enabled: bool = True
    """false: publish version 0 only. For experiments that show what publishing is worth."""
    mode: SyncMode = SyncMode.merged
    """merged: W + (alpha / rank) * B @ A replaces the engine's weights, while it is paused. adapter: the base is sent
    once (INT4: loaded by engines from model.path), then only A and B, into a free slot of the running engine, which is
    never paused; requests finish on the version that they started with. Needs trainer.mode=lora, and GPU engines where
    the model has experts.
    """
    on_busy_slot: BusySlot = BusySlot.wait
    """When requests of older versions read every slot (there are algorithm.max_staleness_steps + 2). `wait` gives up
    after half of timeout_s. Ignored when mode=merged.
    """
    transport: TransportKind = TransportKind.auto
    """Link that must carry the weights; one that is really another link is an error, never a fallback."""
    watermark_bytes: int = 1 << 30
    """Most temporary device memory that a publish may hold on one rank at once, every kind counted. A single transfer
    is cut to at most half of it.
    """
    pause_mode: PauseMode = PauseMode.keep
    """What happens to requests in flight while weights change. With `wait` the longest response must fit timeout_s.
    Ignored when mode=adapter.
    """
    keep_kv: bool = False
    """true: requests in flight go on with KV entries of older weights. false: they are prefilled again under the new
    weights. Ignored when mode=adapter.
    """
    verify_hashes: bool = True
    """Compare a position-dependent 64-bit hash of every parameter at both ends before a version is committed."""
    timeout_s: float = 60.0
    """Deadline of one publish to one replica. A replica that misses it is out of service; the others commit."""
    publish_waves: int = 1
    """Groups in which replicas are updated, one after the other. Above 1 a trainer that dies during a publish leaves
    replicas that serve; a publish takes that many times as long.
    """
    relay: Relay = Relay.none
    """node: the trainer writes to one replica of every node, and the node's others read the version from its memory
    before they serve it. For a trainer that is short of links towards many replicas; `slipstream plan` compares both.
    Needs mode=merged.
    """
    trace_every_steps: int = 0
    """Write the timeline of every publish whose version is a multiple of this to traces/ in the run folder, for
    ui.perfetto.dev. 0: never.
    """

    def __post_init__(self) -> None:
        require(
            self.watermark_bytes >= 1 << 16, f"weight_sync.watermark_bytes must be >= 65536, got {self.watermark_bytes}"
        )
        above(0, "weight_sync", timeout_s=self.timeout_s)
        at_least(1, "weight_sync", publish_waves=self.publish_waves)
        at_least(0, "weight_sync", trace_every_steps=self.trace_every_steps)
        require(
            not (self.keep_kv and self.pause_mode is not PauseMode.keep),
            f"weight_sync.keep_kv=true needs weight_sync.pause_mode=keep, got pause_mode={self.pause_mode}",
        )
