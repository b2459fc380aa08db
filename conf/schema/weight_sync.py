"""Section `weight_sync`: what a publish sends, over which link, and within which limits."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from slipstream.conf.schema.rules import If, above, at_least, read_if, require


class SyncMode(StrEnum):
    """What a publish sends: whole weights with the adapter merged in, or only the adapter, into a slot."""

    merged = "merged"
    adapter = "adapter"


class TransportKind(StrEnum):
    """Link that carries the weights. `auto`: nvlink if both ends are GPUs of this host, otherwise rdma if there is a
    NIC for it, otherwise tcp."""

    auto = "auto"
    tcp = "tcp"
    nvlink = "nvlink"
    rdma = "rdma"


class PauseMode(StrEnum):
    """What happens to requests in flight while weights change: frozen and continued, with KV entries of the new weights
    or of older ones, drained first, or aborted."""

    keep = "keep"
    keep_kv = "keep_kv"
    wait = "wait"
    abort = "abort"


class MergeRounding(StrEnum):
    """How merged weights become the engine's format: by a threshold of each element, so that their mean is right, or
    to nearest, which loses what is less than half a step of the format."""

    dithered = "dithered"
    nearest = "nearest"


class Relay(StrEnum):
    """Who sends a version to a replica: always the trainer, or the trainer to one replica per node, from which the
    node's other replicas read."""

    none = "none"
    node = "node"


class RemoteMerge(StrEnum):
    """Who merges adapters into the weights that engines get: the trainer, or every engine, from a base that it keeps in
    host memory or on its GPUs."""

    none = "none"
    host = "host"
    gpu = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    """How new weights get from trainer ranks into running engines."""

    mode: SyncMode = SyncMode.merged
    """merged: W + (alpha / rank) * B @ A replaces the weights of the paused engine. adapter: the base is sent once
    (INT4: engines load it from model.path), then only A and B, into a free slot of the engine, which is never paused;
    requests finish with the version with which they started. adapter needs trainer.mode=lora and, for a model with
    experts, GPU engines."""
    rounding: MergeRounding = field(
        default=MergeRounding.dithered,
        metadata=read_if(
            If("weight_sync.mode=merged", ": no adapter is merged"), If("trainer.mode=lora", ": no adapter is merged")
        ),
    )
    """How W + (alpha / rank) * B @ A is rounded to bfloat16 or FP8, in engines and in merged/. dithered: up or down by
    a threshold of each element, which stays the same for the run, so that an update smaller than the format's step is
    right in the mean. nearest: such an update is lost, and engines sample from nearly the base (docs/parity.md)."""
    transport: TransportKind = TransportKind.auto
    """Link that must carry the weights. If it turns out to be another one, that is an error; there is no fallback."""
    watermark_bytes: int = 1 << 30
    """The most temporary device memory that a publish may hold on one rank at once, of all kinds together. A single
    transfer is at most half of it."""
    delta_bytes: int = 0
    """Send only elements that changed: so many bytes of each engine rank's GPU, beside the engine's own memory, take
    what changed (four bytes an element) while the engine serves, which pauses to put it in; what changed too much, or
    finds no room, goes whole. The trainer keeps a copy of the adapters as published last (with trainer.mode=full or
    block-FP8 engines: of its part of all weights, in host memory), and its staging slots are a third smaller. 0: every
    publish sends every byte. For links slower than NVLink; where changes cost more GPU time than everything lately,
    everything is sent. Needs mode=merged and model.dtype=bfloat16."""
    remote_merge: RemoteMerge = field(
        default=RemoteMerge.none,
        metadata=read_if(If("weight_sync.mode=merged", ": nothing is merged"), If("trainer.mode=lora", ": no adapter")),
    )
    """Send A and B alone; each engine merges them into the base, which it reads from model.path on its own machine and
    keeps: on the host (page-locked) or on its GPUs. What it then holds is proven by the trainer's hash, as ever: the
    trainer merges and hashes, too. For links slower than NVLink; engines need memory for the base's adapted matrices
    once more. Needs weights in model.path, bfloat16 or float32, and engines that this run starts."""
    pause_mode: PauseMode | None = None
    """What a publish does with requests in flight. keep (null with mode=merged): they are frozen, prefilled again with
    the new weights, and go on. keep_kv: they go on with KV entries of older weights. wait (null with mode=adapter):
    they finish first, so the longest response must fit into timeout_s. abort: they start anew. mode=adapter does so
    only when requests of older versions read every slot (there are algorithm.max_staleness_steps + 2, and one more with
    run.eval_beside), waits half of timeout_s, starts a group anew at most twice, and has no keep_kv."""
    verify_hashes: ClassVar[bool] = True
    """Compare a position-dependent 64-bit hash of every parameter at both ends before a version is committed. Benches
    time a publish without it."""
    timeout_s: float = 60.0
    """Deadline of one publish to one replica. A replica that misses it is taken out of service; the others commit."""
    relay: Relay = field(default=Relay.none, metadata=read_if(If("rollout.num_workers!=1", cure="start more workers")))
    """none: the trainer writes to every replica. node: it writes to one replica per node, and the node's others read
    the version from that one's memory. Use node if the trainer has few links for many replicas; `slipstream plan`
    compares both. Needs mode=merged."""
    trace_every_steps: int = 0
    """Write a timeline of every publish whose version is a multiple of this to traces/ in the run folder; open it in
    ui.perfetto.dev. 0: never."""

    def __post_init__(self) -> None:
        require(
            self.watermark_bytes >= 1 << 16, f"weight_sync.watermark_bytes must be >= 65536, got {self.watermark_bytes}"
        )
        require(
            self.delta_bytes == 0 or self.delta_bytes >= 64,
            f"weight_sync.delta_bytes must be 0 or >= 64, got {self.delta_bytes}",
        )
        require(
            self.delta_bytes == 0 or self.mode is SyncMode.merged,
            f"weight_sync.delta_bytes={self.delta_bytes} needs weight_sync.mode=merged; 0 sends every byte",
        )
        require(
            self.delta_bytes == 0 or self.remote_merge is RemoteMerge.none,
            f"weight_sync.delta_bytes={self.delta_bytes} and weight_sync.remote_merge={self.remote_merge} are two ways "
            "to send less; set delta_bytes=0 or remote_merge=none",
        )
        require(
            self.mode is SyncMode.merged or self.pause_mode is not PauseMode.keep_kv,
            "weight_sync.pause_mode=keep_kv needs weight_sync.mode=merged: a slot's requests keep their version; set "
            "wait, keep or abort",
        )
        above(0, "weight_sync", self, "timeout_s")
        at_least(0, "weight_sync", self, "trace_every_steps")

    @property
    def requests_in_flight(self) -> PauseMode:
        """`pause_mode`, or the mode's own."""
        if self.pause_mode is not None:
            return self.pause_mode
        return PauseMode.keep if self.mode is SyncMode.merged else PauseMode.wait

    def rounding_seed(self, run_seed: int) -> int | None:
        """Seed of the thresholds by which merged weights are rounded; None: to nearest."""
        return run_seed if self.rounding is MergeRounding.dithered else None
