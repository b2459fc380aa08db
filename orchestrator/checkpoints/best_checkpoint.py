"""Which evaluated checkpoint is the best one (run.keep_best), on disk and while verdicts are out.

    checkpoints/best.json       {"metric": "eval/reward", "value": 0.62, "step": 40, "held_out": {"": "aime.jsonl"},
                                 "options": {"reward.kind": "math", ...}}
    checkpoints/best -> step-000040/

Owns: that choice, which options its figure depends on, and that the best checkpoint, and those whose evaluation goes
on, are not removed as old ones. Does not own: which figure is better (figures/held_out.py), the checkpoints
(run_checkpoint.py).
"""

import json
import logging
from dataclasses import asdict

from slipstream.conf.json_files import JsonMapping, JsonObject, object_in
from slipstream.conf.schema import Objective, RunConfig
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore
from slipstream.orchestrator.figures.held_out import is_better
from slipstream.orchestrator.files.run_folder import changes, flatten, to_plain

logger = logging.getLogger(__name__)


_OF_NO_FIGURE = frozenset(
    {"api_key_env", "base_url", "cache_path", "env", "max_concurrent", "num_processes", "requests_per_minute", "seed"}
)
"""Options of these sections that change no verdict; nor do seconds, which some have to be given more of."""


def options_behind(config: RunConfig) -> JsonObject:
    """The options that run.keep_best's figure of a policy depends on, by their full names."""
    metric, data, options = str(config.run.keep_best), config.data, JsonObject()
    if data.drop_too_long:
        options |= {"data.max_sequence_tokens": data.max_sequence_tokens, "prompt tokens": config.max_prompt_tokens}
    if config.algorithm.objective is not Objective.policy:
        return options | ({"algorithm.dpo_beta": config.algorithm.dpo_beta} if metric.endswith("dpo_loss") else {})
    rollout = {name: asdict(getattr(config.rollout, name)) for name in ("sampling", "eval", "episodes")}
    sections = flatten(
        to_plain({"reward": asdict(config.reward), "rollout": {**rollout, "agent": config.rollout.agent}})
    )
    ends = ((name, name.rpartition(".")[2], value) for name, value in sections)
    options |= {name: value for name, end, value in ends if end not in _OF_NO_FIGURE and not end.endswith("_s")}
    if not metric.endswith("/reward"):
        options["run.eval_right_from"] = config.run.eval_right_from
    if metric.endswith("/majority"):
        options["run.eval_samples_per_prompt"] = config.run.eval_samples_per_prompt
    return options


class BestCheckpoint:
    """See the module's docstring.

    Args:
        config: run.keep_best, and what its figure depends on. A figure of other held-out rows, or by other options,
            says nothing here: the first one that comes is better.
        up_to_step: a best one of a later step is forgotten: a resumed run redoes its work.
    """

    def __init__(self, store: CheckpointStore, config: RunConfig, *, up_to_step: int) -> None:
        self._store = store
        self._metric = metric = str(config.run.keep_best)
        self._held_out, self._options = dict(config.data.held_out_sources), options_behind(config)
        self._file = store.folder / "best.json"
        self._value: float | None = None
        self._step: int | None = None
        known = object_in(self._file)
        step = known.get("step", up_to_step + 1)
        if step > up_to_step or store.of_step(step) is None:
            return
        self._step = step
        store.spared.add(step)
        others = changes(
            _told(known.get("metric"), known.get("held_out", self._held_out), known.get("options", self._options)),
            _told(metric, self._held_out, self._options),
        )
        if others:
            logger.warning(
                "step %d was the best by another figure, and one is chosen anew (%s)", step, "; ".join(others)
            )
        else:
            self._value = float(known["value"])

    def evaluating(self, step: int) -> None:
        """The step's checkpoint stays until judge()."""
        self._store.spared.add(step)

    def judge(self, step: int, value: float | None) -> None:
        """Keep the step's checkpoint if its figure is better than the best one so far."""
        path = self._store.of_step(step)
        is_better_than_any = value is not None and (self._value is None or is_better(self._metric, value, self._value))
        if path is not None and is_better_than_any:
            self._store.spared.discard(-1 if self._step is None else self._step)
            self._store.spared.add(step)
            self._step, self._value = step, value
            self._write(path.name)
            logger.info("best checkpoint: %s, with %s %.4g", path, self._metric, value)
        elif step != self._step:
            self._store.spared.discard(step)
        self._store.prune()

    def _write(self, name: str) -> None:
        facts = {"metric": self._metric, "value": self._value, "step": self._step}
        facts |= {"held_out": self._held_out, "options": self._options}
        write_whole(self._file, json.dumps(facts) + "\n")
        link = self._file.with_name(".best-link.partial")
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(self._file.with_name("best"))


def _told(metric: object, held_out: JsonMapping, options: JsonMapping) -> JsonObject:
    """What gives a figure its meaning, by the names in which people are told."""
    return {"run.keep_best": metric, "held-out rows": list(held_out.values()), **options}
