"""What W&B and MLflow are told of a start of a run, beside its rows."""

from dataclasses import dataclass

from slipstream.conf.json_files import JsonMapping


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start of a run, as W&B and MLflow show it: they never take a row back, so each start is a run of theirs, and
    rows of steps that a resumed run does again do not mix with the earlier ones."""

    name: str
    """The run's name, and from which step on: run-20260131-120000-from-50."""
    group: str
    """The run's name: what all its starts have in common."""
    options: JsonMapping
    """Every option of the run by its full name."""
