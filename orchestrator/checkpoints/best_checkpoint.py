"""Which evaluated checkpoint is the best one (run.keep_best), on disk and while verdicts are out.

    checkpoints/best.json       {"metric": "eval/reward", "value": 0.62, "step": 40, "held_out": {"": "aime.jsonl"}}
    checkpoints/best -> step-000040/

Owns: that choice, and that the best checkpoint, and those whose evaluation goes on, are not removed as old ones. Does
not own: which figure is better (figures/held_out.py), the checkpoints (run_checkpoint.py).
"""

import json
import logging
from collections.abc import Mapping

from slipstream.conf.json_files import object_in
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore
from slipstream.orchestrator.figures.held_out import is_better

logger = logging.getLogger(__name__)


class BestCheckpoint:
    """See the module's docstring.

    Args:
        metric: run.keep_best.
        held_out: DataConfig.held_out_sources. A figure of others says nothing here.
        up_to_step: a best one of a later step is forgotten: a resumed run redoes its work.
    """

    def __init__(self, store: CheckpointStore, metric: str, *, held_out: Mapping[str, str], up_to_step: int) -> None:
        self._store = store
        self._metric = metric
        self._held_out = dict(held_out)
        self._file = store.folder / "best.json"
        self._value: float | None = None
        self._step: int | None = None
        known = object_in(self._file)
        is_known = known.get("metric") == metric and known.get("held_out", self._held_out) == self._held_out
        if is_known and known.get("step", up_to_step + 1) <= up_to_step:
            step = int(known["step"])
            if store.of_step(step) is not None:
                self._step, self._value = step, float(known["value"])
                store.spared.add(step)

    def evaluating(self, step: int) -> None:
        """The step's checkpoint stays until judge()."""
        self._store.spared.add(step)

    def judge(self, step: int, value: float | None) -> None:
        """Keep the step's checkpoint if its figure is better than the best one so far."""
        path = self._store.of_step(step)
        is_better_than_any = value is not None and (self._value is None or is_better(self._metric, value, self._value))
        if path is not None and is_better_than_any:
            self._store.spared.discard(-1 if self._step is None else self._step)
            self._step, self._value = step, value
            self._write(path.name)
            logger.info("best checkpoint: %s, with %s %.4g", path, self._metric, value)
        elif step != self._step:
            self._store.spared.discard(step)
        self._store.prune()

    def _write(self, name: str) -> None:
        facts = {"metric": self._metric, "value": self._value, "step": self._step, "held_out": self._held_out}
        write_whole(self._file, json.dumps(facts) + "\n")
        link = self._file.with_name(".best-link.partial")
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(self._file.with_name("best"))
