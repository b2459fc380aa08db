"""What a run that is to be resumed goes on from, whether its rows are those that it began with, and how long its
warm-up stays.

Owns: where that is found before anything starts. Does not own: what makes an order another one
(data/training_stream.py).
"""

from collections.abc import Sequence
from dataclasses import replace

import yaml

from slipstream.conf.errors import SlipstreamError
from slipstream.conf.json_files import object_in, object_or_empty
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.checkpoints.journal import waits_for
from slipstream.orchestrator.checkpoints.object_store import CONFIG, ENVIRONMENT, ObjectStore
from slipstream.orchestrator.checkpoints.run_checkpoint import Resumable, checkpoints_of
from slipstream.orchestrator.data.streams import Item
from slipstream.orchestrator.data.training_stream import Items, check_goes_on
from slipstream.orchestrator.files.run_folder import WARM_UP, WARM_UP_OF, RunFolder, flatten, resumed_folder


def resumable(config: RunConfig) -> Resumable | None:
    """What a resumed run goes on from: processes that wait for it, or a checkpoint; None of another run. Raises:
    CheckpointError, where there is none, or it is of a run with other options."""
    root = resumed_folder(config.run)
    if root is None or config.run.resume is None:
        return None
    if (left := waits_for(config)) is not None:
        return Resumable(left.step, left.prompts)
    return checkpoints_of(config, RunFolder(root.resolve())).step_to_resume(config.run.resume)


def with_its_warm_up(config: RunConfig) -> RunConfig:
    """The same options; where a resume has another run.num_steps, a warm-up that was a share of the run's updates is as
    many updates as it was before. (In a longer one the rate would fall back, and rise once more.)"""
    optim, root = config.trainer.optim, resumed_folder(config.run)
    if root is None or not 0 < optim.warmup_steps < 1:
        return config
    try:
        folder, store = RunFolder(root.resolve()), ObjectStore(str(config.run.resume))
        is_here = folder.config.is_file()
        text = folder.config.read_text() if is_here else store.text(CONFIG)
        before = dict(flatten(object_or_empty(yaml.safe_load(text or ""))))
        environment = object_in(folder.environment) if is_here else store.document(ENVIRONMENT)
    except (OSError, ValueError, yaml.YAMLError, SlipstreamError):  # check_run_folder says so
        return config
    num_steps, given = before.get("run.num_steps"), before.get(WARM_UP)
    if environment.get(WARM_UP_OF) == optim.warmup_steps and isinstance(given, float):  # kept by a resume before
        return _with_warm_up(config, given)
    if not isinstance(num_steps, int) or num_steps in (0, config.run.num_steps):
        return config
    if given != optim.warmup_steps:  # the user's own
        return config
    return _with_warm_up(config, optim.warmup_updates(num_steps * config.algorithm.updates_per_step))


def _with_warm_up(config: RunConfig, num_updates: float) -> RunConfig:
    optim = replace(config.trainer.optim, warmup_steps=float(num_updates))
    return replace(config, trainer=replace(config.trainer, optim=optim))


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
