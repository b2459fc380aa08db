"""Which evaluated checkpoint is the best one (run.keep_best), on disk and while verdicts are out.

    checkpoints/best.json       {"metric": "eval/reward", "value": 0.62, "step": 40, "since": 0,
                                 "held_out": {"": "aime.jsonl"}, "options": {"reward.kind": "math", ...},
                                 "files": {"the file of reward.kind": "9f86d081884c", ...}}
    checkpoints/best -> step-000040/

Owns: that choice, which options its figure depends on, and that the best checkpoint, and those whose evaluation goes
on, are not removed as old ones. Does not own: which figure is better (metrics/held_out.py), the checkpoints
(run_checkpoint.py).
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from slipstream.conf.checks.ignored import is_read
from slipstream.conf.functions import source_of
from slipstream.conf.json_files import JsonMapping, JsonObject, object_in, object_or_empty
from slipstream.conf.schema import Objective, RunConfig
from slipstream.conf.whole_files import point, write_whole
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore
from slipstream.orchestrator.files.row_files import read_figures
from slipstream.orchestrator.files.run_folder import RunFolder, changes, flatten, to_plain
from slipstream.orchestrator.metrics.held_out import is_better

logger = logging.getLogger(__name__)


_OF_NO_FIGURE = frozenset(
    {
        *("address", "api_key_env", "base_url", "cache_path", "env"),
        *("max_concurrent", "num_processes", "requests_per_minute", "seed"),
    }
)
"""Options of these sections that change no verdict; nor do seconds, which some have to be given more of."""
_OF_LENGTH = frozenset({"reward.length_penalty", "reward.overlong_penalty", "reward.overlong_tokens"})
"""What these take from a reward makes no response wrong."""


def options_behind(config: RunConfig) -> JsonObject:
    """The options that run.keep_best's figure of a policy depends on, by their full names."""
    metric, data, options = str(config.run.keep_best), config.data, JsonObject()
    if data.drop_too_long:
        options["prompt tokens"] = config.max_prompt_tokens
    if config.algorithm.objective is not Objective.policy:
        options |= {"data.max_sequence_tokens": data.max_sequence_tokens} if data.drop_too_long else {}
        return options | ({"algorithm.dpo_beta": config.algorithm.dpo_beta} if metric.endswith("dpo_loss") else {})
    rollout = {name: asdict(getattr(config.rollout, name)) for name in ("sampling", "eval", "episodes")}
    rollout |= {"agent": config.rollout.agent, "max_model_len": config.rollout.max_model_len}
    sections = flatten(to_plain({"reward": asdict(config.reward), "rollout": rollout}))
    options |= {name: value for name, value in sections if _may_change_it(name, config)}
    if not metric.endswith("/reward"):
        options["run.eval_right_from"] = config.run.eval_right_from
    if metric.endswith("/majority"):
        options["run.eval_samples_per_prompt"] = config.run.eval_samples_per_prompt
    return options


def files_behind(options: JsonMapping, held_out: Mapping[str, str]) -> JsonObject:
    """Hashes of the files that decide a figure by what is in them: the user's code, judges' prompts, held-out rows."""
    files = {f"the file of {source}": Path(source) for source in held_out.values()}
    for name, value in options.items():
        end = name.rpartition(".")[2]
        if end == "prompt_file" and value is not None:
            files[f"the file of {name}"] = Path(value)
        elif end in ("kind", "agent") and ":" in str(value) and (source := source_of(str(value))) is not None:
            files[f"the file of {name}"] = source
    return {name: _digest(file) for name, file in files.items() if file.is_file()}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:12]


def _may_change_it(name: str, config: RunConfig) -> bool:
    """Whether another value of an option that options_behind looks at may give the figure another meaning."""
    end, rollout = name.rpartition(".")[2], config.rollout
    if end in _OF_NO_FIGURE or end.endswith("_s") or not is_read(config, name):
        return False
    if name in _OF_LENGTH:
        return str(config.run.keep_best).endswith("/reward")
    if name == "rollout.max_model_len":
        return rollout.agent is not None  # a response alone has room for all of its tokens
    return name != "rollout.sampling.temperature" or rollout.eval.temperature is None


class BestCheckpoint:
    """See the module's docstring. `config`: run.keep_best, and what its figure depends on. A best figure of other
    held-out rows, or by other options, does not count: the first one that comes is better. Nor does one of a step after
    `up_to_step`, whose work a resumed run does again."""

    def __init__(self, store: CheckpointStore, config: RunConfig, *, up_to_step: int) -> None:
        self._store = store
        self._metric = metric = str(config.run.keep_best)
        self._held_out, self._options = dict(config.data.held_out_sources), options_behind(config)
        self._files = files_behind(self._options, self._held_out)
        self._file = store.folder / "best.json"
        self._value: float | None = None
        self._step: int | None = None
        self._since = up_to_step
        """Figures of later steps mean what this run's do."""
        known = object_in(self._file)
        step = known.get("step")
        if step is not None and step <= up_to_step and store.of_step(step) is not None:
            self._step = step
            store.spared.add(step)
        behind = object_or_empty(known.get("options")) | object_or_empty(known.get("files"))
        others = changes(
            _told(known.get("metric"), object_or_empty(known.get("held_out")), behind),
            _told(metric, self._held_out, self._options | self._files),
        )
        if known and not others:
            self._since = min(known.get("since", up_to_step), up_to_step)
            self._value = None if self._step is None else known["value"]
        elif self._step is not None:
            logger.warning(
                "step %d was the best by another figure, and one is chosen anew (%s)", step, "; ".join(others)
            )
        store.folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self._judge_rows(up_to_step)

    def _judge_rows(self, up_to_step: int) -> None:
        """Who is killed has written an evaluation's row, and perhaps no verdict. Of the others nothing changes."""
        rows = read_figures(RunFolder(self._store.folder.parent).evaluations, [self._metric])
        figures = {row["step"]: row.get(self._metric) for row in rows if self._since < row["step"] <= up_to_step}
        self._store.spared.update(figures)
        for step, value in figures.items():
            self.judge(step, value)

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
            self._write()
            logger.info("best checkpoint: %s, with %s %.4g", path, self._metric, value)
        elif step != self._step:
            self._store.spared.discard(step)
        self._store.prune()

    def _write(self) -> None:
        facts = {"metric": self._metric, "value": self._value, "step": self._step, "since": self._since}
        facts |= {"held_out": self._held_out, "options": self._options, "files": self._files}
        write_whole(self._file, json.dumps(facts) + "\n")
        link, path = self._file.with_name("best"), None if self._step is None else self._store.of_step(self._step)
        if path is None:
            link.unlink(missing_ok=True)
        else:
            point(link, path.name)


def _told(metric: object, held_out: JsonMapping, options: JsonMapping) -> JsonObject:
    """What gives a figure its meaning, by the names in which people are told."""
    return {"run.keep_best": metric, "held-out rows": list(held_out.values()), **options}
