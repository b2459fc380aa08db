"""What a run that is to be resumed goes on from, and whether its rows are those that it began with.

Owns: where that is found before anything starts. Does not own: what makes an order another one
(data/training_stream.py).
"""

from collections.abc import Sequence

from slipstream.conf.errors import SlipstreamError
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.checkpoints.journal import waits_for
from slipstream.orchestrator.checkpoints.run_checkpoint import Resumable, checkpoints_of
from slipstream.orchestrator.data.streams import Item
from slipstream.orchestrator.data.training_stream import Items, check_goes_on
from slipstream.orchestrator.files.run_folder import RunFolder, resumed_folder


def resumable(config: RunConfig) -> Resumable | None:
    """What a resumed run goes on from: processes that wait for it, or a checkpoint; None of another run. Raises:
    CheckpointError, where there is none, or it is of a run with other options."""
    root = resumed_folder(config.run)
    if root is None or config.run.resume is None:
        return None
    if (left := waits_for(config)) is not None:
        return Resumable(left.step, left.prompts)
    return checkpoints_of(config, RunFolder(root.resolve())).step_to_resume(config.run.resume)


def check_rows_go_on(config: RunConfig, items: Sequence[Items[Item]] | None) -> None:
    """Refuse other rows than a resumed run began with, or another order of them. What else is wrong with what it goes
    on from, the check of its folder reports. `items` are those of each training source as the run reads them, if they
    are known."""
    try:
        found = resumable(config)
    except SlipstreamError:
        return
    if found is not None:
        check_goes_on(config.data, found.prompts, items)
