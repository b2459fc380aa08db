"""The report of `slipstream push`: its figures, the text that is printed, and the check that every engine serves.

Plain data.
"""

from dataclasses import dataclass, field

from slipstream.conf.json_files import JsonObject
from slipstream.conf.plural import counted
from slipstream.orchestrator.errors import PushError


@dataclass(slots=True)
class PushReport:
    """What was done. Seconds count from the command's own start unless they say otherwise."""

    checkpoint: str
    num_bytes: int
    num_ranks: int
    device: str
    base: str = ""
    link: str = ""
    read_s: float = 0.0
    """Seconds of the slowest rank's read."""
    pinned_bytes: int = 0
    disk_done_s: float = 0.0
    engines_up_s: float = 0.0
    """When the last engine answered; 0 with --to."""
    attached_s: float = 0.0
    """When all ranks of the last engine had opened their endpoints."""
    attach_s: dict[str, float] = field(default_factory=dict)
    """Seconds of attaching the slowest engine ("whole"), and of the steps of its slowest rank."""
    expected_s: float = 0.0
    """When the expected layouts of started engines were recorded from the model; 0: not before the engines were up."""
    expected_error: str = ""
    num_expected: int = 0
    """Engine ranks that have the expected layout, and so did not record every layer."""
    plan_s: float = 0.0
    """Seconds of planning for the expected layouts, in the slowest rank; 0: connect_s includes the planning."""
    connect_s: float = 0.0
    """Seconds of connecting to the engines, allocating staging, and planning if it was not done, in the slowest
    rank."""
    base_s: float = 0.0
    """With a base: seconds until the slowest rank had read it, after it had connected, and packed it."""
    num_engine_ranks: int = 0
    publish_s: float = 0.0
    serving_s: float = 0.0
    """When the last engine was resumed."""
    publish: JsonObject = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    """URL -> "" if the engine serves the checkpoint, otherwise why not."""


def describe(report: PushReport) -> str:
    lines = [
        f"{report.checkpoint}: {report.num_bytes / 1e9:.2f} GB, {counted(report.num_ranks, 'rank')}, {report.device}",
        f"  read      {report.read_s:8.2f} s   {report.num_bytes / max(report.read_s, 1e-9) / 1e9:.2f} GB/s, "
        f"{report.pinned_bytes / 1e9:.2f} GB page-locked",
        f"  publish   {report.publish_s:8.2f} s   {report.publish['num_bytes'] / report.publish_s / 1e9:.2f} GB/s "
        f"over {report.link}",
    ]
    if report.engines_up_s:
        lines.append(
            f"  disk read after {report.disk_done_s:.2f} s, engines up after {report.engines_up_s:.2f} s, "
            f"attached after {report.attached_s:.2f} s"
        )
    steps = " + ".join(f"{name} {seconds:.2f}" for name, seconds in report.attach_s.items() if name != "whole")
    expected = f"; {counted(report.num_expected, 'rank')} as expected" if report.engines_up_s else ""
    lines.append(
        f"  attach    {report.attach_s['whole']:8.2f} s   of it {steps}{expected}"
        + (f" ({report.expected_error})" if report.expected_error else "")
    )
    lines.append(f"  connect   {report.connect_s:8.2f} s   beside {report.plan_s:.2f} s of planning beforehand")
    if report.base:
        lines.append(f"  base      {report.base_s:8.2f} s   {_describe_changes(report)}")
    lines.append(f"  serving after {report.serving_s:.2f} s")
    for url, error in report.engines.items():
        ends = f"DOES NOT SERVE, it stays paused: {error}" if error else "serves the checkpoint, every byte verified"
        lines.append(f"  {url}  {ends}")
    return "\n".join(lines)


def _describe_changes(report: PushReport) -> str:
    """What the base has saved."""
    publish = report.publish
    share = "" if publish["changed_fraction"] is None else f"; {100 * publish['changed_fraction']:.3g} % of it differs"
    holders = f"{publish['num_takers']} of {report.num_engine_ranks} engine ranks hold {report.base}"
    return f"{holders}{share}; {publish['num_bytes']} bytes sent"


def check_all_serve(report: PushReport) -> None:
    """Raise PushError unless every engine serves the checkpoint."""
    failed = [url for url, error in report.engines.items() if error]
    if failed:
        raise PushError(
            f"{len(failed)} of {len(report.engines)} engines do not serve the checkpoint: {', '.join(failed)}; "
            "push again"
        )
