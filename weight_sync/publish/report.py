"""The result of a publish: transaction.py fills it and the publisher returns it. Plain data, no torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

EXCLUDED = "excluded by the caller"
"""ReplicaReport.error of a replica that was left out on request."""
NOT_MET = "out of service when the trainer connected"
"""... and of one of which nothing is known."""
SECONDS = ("begin_s", "idle_s", "mark_s", "prepare_s", "write_s", "verify_s", "commit_s", "total_s")
SUMMED = (*SECONDS, "num_bytes", "num_takers")
"""What the rounds of a publish add up."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    endpoint: str
    committed: bool
    error: str | None = None
    """Class name and text; None if it committed."""
    pause_s: float = 0.0
    """Seconds from its begin until it served again; 0 if it does not serve."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One publish, the same on every rank. prepare_s, write_s and peak_bytes are the worst rank's, verify_s and
    commit_s the slowest replica's; begin_s and total_s are rank 0's wall clock."""

    version: int
    epoch: int
    replicas: tuple[ReplicaReport, ...]
    pause_s: float = 0.0
    """Longest pause of a replica that committed."""
    begin_s: float = 0.0
    """Until every replica had paused and was marked dirty, or was given up. The first loads are packed meanwhile."""
    idle_s: float = 0.0
    """Part of begin_s: until the slowest engine had paused, including its step in flight."""
    mark_s: float = 0.0
    """Part of begin_s: from then until the slowest engine's ranks were marked dirty."""
    prepare_s: float = 0.0
    """Packing and hashing; overlaps begin_s and write_s."""
    write_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    num_bytes: int = 0
    """Bytes that were sent, of all ranks to all replicas."""
    peak_bytes: int = 0
    watermark_bytes: int = 0
    num_changed_params: int | None = None
    """Parameters, of engines that committed, whose bytes differ from those of the engine's last commit; None at the
    first publish and if hashes are off. 0 after an optimizer step means that the step did not reach the source, or was
    lost in rounding."""
    num_relayed: int = 0
    """Replicas that read the version from another replica of their node (weight_sync.relay)."""
    relay_s: float = 0.0
    """Part of total_s: these reads, after the writes."""
    relay_bytes: int = 0
    """Bytes of these reads; not in num_bytes."""
    update_error: float | None = None
    """Share of an adapter's update that is not in merged weights, from some of this rank's rows; None without one. This
    and changed_fraction are not the same on every rank."""
    changed_fraction: float | None = None
    """Share of elements whose bits changed since the publish before: of all that were compared to send changes alone;
    in a run, of this rank's, from some rows. None where nothing was compared."""
    num_takers: int = 0
    """Engine ranks that proved to hold what was published before, and so got changes alone."""

    @property
    def num_committed(self) -> int:
        """Replicas that serve this version."""
        return sum(replica.committed for replica in self.replicas)


def to_nobody(version: int, endpoints: Sequence[str], exclude: Collection[int]) -> PublishReport:
    """The report of a publish while no replica has been met."""
    replicas = (
        ReplicaReport(endpoint, committed=False, error=EXCLUDED if number in exclude else NOT_MET)
        for number, endpoint in enumerate(endpoints)
    )
    return PublishReport(version, 0, tuple(replicas))


def joined(reports: Sequence[PublishReport], rounds: Sequence[Sequence[int]]) -> PublishReport:
    """Join the rounds of one publish, each with the replicas that it wrote to, into one report: seconds and bytes add
    up, pauses and peaks do not."""
    replicas = list(reports[-1].replicas)
    for report, written in zip(reports, rounds, strict=True):
        for number in written:
            replicas[number] = report.replicas[number]
    changed = [report.num_changed_params for report in reports if report.num_changed_params is not None]
    return replace(
        reports[-1],
        replicas=tuple(replicas),
        pause_s=max(report.pause_s for report in reports),
        peak_bytes=max(report.peak_bytes for report in reports),
        num_changed_params=sum(changed) if changed else None,
        **{name: sum(getattr(report, name) for report in reports) for name in SUMMED},
    )
