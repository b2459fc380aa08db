"""What `slipstream plan` says of the same publish in another way: through relays, of changes, of factors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelayChoice:
    """The same publish with weight_sync.relay=node."""

    num_written: int
    """Replicas that the trainer writes to; the others read from one of these, on their node."""
    num_bytes: int
    """Bytes that the trainer sends."""
    written_s: float
    """Until those replicas have committed."""
    read_s: float
    """From then until all replicas have committed."""

    @property
    def total_s(self) -> float:
        return self.written_s + self.read_s


@dataclass(frozen=True, slots=True)
class DeltaChoice:
    """The same publish with weight_sync.delta_bytes, to engines that hold the version before."""

    changed: float
    """Share of the elements that changed: assumed."""
    num_bytes: int
    """Bytes that the trainer sends: what changed, and whole what finds no room in the fullest engine rank's zone, or
    changed too much to be sent by element."""
    total_s: float
    """With the second merge or, in full training and for FP8, the comparison with what is kept on the host."""
    kept_bytes: int
    """On the fullest trainer rank, beside the rest: the adapters as published last; 0 where host_bytes are kept."""
    host_bytes: int
    """In full training and for FP8, in host memory for the fullest trainer rank: what it published last."""
    zone_bytes: int
    """On every engine rank, beside the rest: weight_sync.delta_bytes."""


@dataclass(frozen=True, slots=True)
class RemoteMergeChoice:
    """The same publish with weight_sync.remote_merge."""

    num_bytes: int
    """Bytes of A and B that the trainer sends, to all engines."""
    total_s: float
    """With the engines' merges, and with the trainer's, which it hashes."""
    base_bytes: int
    """On the fullest engine rank, beside the rest: what is merged into."""
    is_on_host: bool
    """Whether they lie in host memory, or else on the GPU."""
