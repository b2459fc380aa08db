"""Says where a run stands, from its folder alone: `slipstream status`.

    config.yaml, metrics.jsonl, evaluations.jsonl, run.log, the run's lock and end --> Status --> text, or JSON

Owns: what is shown, and how many steps a mean is taken over. Does not own: the numbers (telemetry.py), the lock
(control_folder.py). Invariant: the run is asked nothing, and nothing is written but a picture, on request; a run that
writes meanwhile is read up to its last whole row.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonMapping, JsonObject, object_in
from slipstream.conf.plural import counted
from slipstream.conf.schema import Device, Objective
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, step_of
from slipstream.orchestrator.control.control_folder import dashboard_of, start_of, state_of
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.files.row_files import last_rows, read_figures
from slipstream.orchestrator.files.run_folder import RunFolder, parts_before, saved_options
from slipstream.orchestrator.files.run_log import format_s
from slipstream.orchestrator.files.startup import RUN, describe, read_starts
from slipstream.orchestrator.metrics.goodput import COLUMNS, goodput_of
from slipstream.orchestrator.metrics.held_out import of_sets
from slipstream.orchestrator.metrics.step_rows import failed_of, failure_counts

NUM_RECENT = 20
"""Means are taken over this many steps."""
NUM_LOG_LINES = 5
_SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("reward/no_spread_fraction", "groups of equal rewards", ".0%"),
    ("distill/kl_mean", "KL to the teacher, nats", ".3f"),
    ("rollout/response_tokens_mean", "tokens of a response", ".0f"),
    ("rollout/truncated_fraction", "responses cut off", ".0%"),
    ("sft/nll", "nll", ".4f"),
    ("dpo/loss", "preference loss", ".4f"),
    ("dpo/accuracy", "pairs in the right order", ".3f"),
    ("dpo/margin_mean", "margin", ".3f"),
    ("parity/k3", "trainer against engine, k3", ".1e"),
    ("parity/floor_k3", "  k3 of rounding alone", ".1e"),
    ("parity/k3_stale", "  k3 of stale tokens", ".1e"),
    ("policy/entropy", "entropy", ".2f"),
    ("optim/grad_norm", "gradient norm", ".3g"),
    ("rollout/wait_s", "wait for a batch, s", ".2f"),
    ("sync/total_s", "publish, s", ".3f"),
    ("sync/pause_s", "pause, s", ".3f"),
    ("step/total_s", "step, s", ".2f"),
    ("trainer/tokens_per_s_per_rank", "trainer tokens/s per rank", ".0f"),
    ("rollout/tokens_per_s", "response tokens/s", ".0f"),
)
"""(metric, words, format) of the means."""
_COUNTED = (
    ("rollout/groups_failed", "groups sampled again"),
    ("rollout/restarts", "workers restarted"),
    ("rollout/handed_over", "responses handed over"),
    ("trainer/restarts", "trainer ranks restarted"),
    ("optim/skipped", "steps refused"),
)
"""(metric, words) of what is added up over the whole run, and shown unless it is 0."""
_FAILED = (("reward", "rewards that failed"), ("eval", "held-out rewards that failed"))
"""(area, words) of the same for rewards, which are shown as "3 of 64"."""


@dataclass(frozen=True, slots=True)
class Status:
    """One run at one moment."""

    run: str
    state: str
    """running, finished, stopped (as it was told), failed, or unknown: it is another user's, who alone may know."""
    error: str | None
    """Why it failed."""
    starting: str | None
    """How long its start takes so far, and what it waits for; None once it is over."""
    parts_before: tuple[str, ...]
    """Files with the options of each part of the run before the last resume."""
    step: int | None
    """Optimizer steps done; None before the first row."""
    num_steps: int
    since_s: float | None
    """Seconds since the last row."""
    left_s: float | None
    """How long a running run still takes: steps to go times the median of the recent ones."""
    recent: dict[str, float]
    """Metric -> its mean over the last NUM_RECENT steps that have it."""
    held_out: dict[str, float]
    """eval/reward, eval/nll or eval/dpo_loss, by its step: "eval/reward at step 40"; of the newest evaluation those of
    each set, too: "eval/aime/reward at step 40"."""
    counts: dict[str, int]
    """Metric -> its sum over the run."""
    replicas_serving: int | None
    replicas_wanted: int | None
    """As many rollout workers were asked for."""
    dashboard: str | None
    """Where Ray's page is, with the file of its token; None unless the run goes on and has one."""
    checkpoint: int | None
    """Step of the newest one."""
    best: JsonObject
    """Step, metric and value of the best one (run.keep_best), the value null where it means another thing than figures
    of now; empty: there is none."""
    remote: JsonObject
    """Where checkpoints are sent: url, step of the newest one there, problem of the last try; empty: nowhere."""
    loss_steps: int | None
    """Finished steps that are lost with the machine: those after the newest checkpoint, the store's if there is one."""
    rank_loss_steps: int | None
    """Finished steps that a trainer rank's death would at most make again; None: it ends the run."""
    goodput: JsonObject
    """The whole run's share, quiet_tokens_per_gpu_s, gpu_s, and lost by cause; empty before three quiet steps."""
    device: str
    """cuda, or cpu, where goodput counts processes; by this machine where the run was told neither."""
    start: tuple[str, ...]
    """What the last start of the run took, and for what; empty until it was up."""
    log: tuple[str, ...]
    """Last warnings and errors of run.log."""

    def as_text(self) -> str:
        lines = [("run", self.run), ("state", self.state)]
        if self.error is not None:
            lines.append(("error", self.error))
        if self.starting is not None:
            lines.append(("starting", self.starting))
        if self.parts_before:
            before = f"{', '.join(self.parts_before)} and environment.*.json"
            lines.append(("resumed", f"{counted(len(self.parts_before), 'time')}; it ran before with {before}"))
        if self.step is None:
            lines.append(("step", f"none of {self.num_steps} yet"))
        else:
            since = f", {format_s(self.since_s)} ago" if self.since_s is not None else ""
            left = f", left {format_s(self.left_s)}" if self.left_s is not None else ""
            lines.append(("step", f"{self.step} of {self.num_steps}{since}{left}"))
        first, *others = _SHOWN
        shown = (first, *_reward_parts([self.recent]), *others)
        lines += [(name, format(self.recent[metric], spec)) for metric, name, spec in shown if metric in self.recent]
        lines += [(name.replace("eval/", "held-out "), f"{value:.4g}") for name, value in self.held_out.items()]
        if self.replicas_serving is not None:
            is_short = self.replicas_wanted not in (None, self.replicas_serving)
            wanted = f" of {self.replicas_wanted} wanted" if is_short else ""
            lines.append(("engines serving", f"{self.replicas_serving}{wanted}"))
        lines += [(name, told) for area, name in _FAILED if (told := failed_of([self.counts], area)) is not None]
        lines += [(name, str(self.counts[metric])) for metric, name in _COUNTED if self.counts.get(metric)]
        if self.dashboard is not None:
            lines.append(("Ray dashboard", self.dashboard))
        lines += self._losses()
        if self.goodput:
            of = f"{self.goodput['gpu_s'] / 3600:.2f} {'process' if self.device == Device.cpu else 'GPU'}-hours"
            lines.append(("goodput", f"{self.goodput['share']:.1%} of {of}"))
            lines += [
                (f"  {cause}", f"{share:.1%}") for cause, share in self.goodput["lost"].items() if share >= 0.0005
            ]
        width = max(len(name) for name, _ in lines)
        text = [f"{name:<{width}}  {value}" for name, value in lines]
        if self.start:
            text += ["", *self.start]
        if self.log:
            text += ["", "last warnings of run.log", *self.log]
        return "\n".join(text)

    def _losses(self) -> list[tuple[str, str]]:
        """The newest checkpoint, and what deaths would cost now."""
        saved = "none" if self.checkpoint is None else f"step {self.checkpoint}"
        if self.remote:
            step, problem = self.remote.get("step"), self.remote.get("problem")
            saved += f"; {'none' if step is None else f'step {step}'} in {self.remote.get('url')}"
            saved += f" (the last try: {problem})" if problem else ""
        lines = [("checkpoint", saved)]
        if self.best.get("step") is not None:
            value = self.best["value"]
            figure = "another figure than the run's now" if value is None else f"{self.best['metric']} {value:.4g}"
            lines.append(("best checkpoint", f"step {self.best['step']}, with {figure}"))
        if self.loss_steps is not None:
            lines.append(("machine lost", f"costs {counted(self.loss_steps, 'finished step')}"))
        if self.loss_steps is not None and self.state == "running":
            kept = self.rank_loss_steps
            cost = "ends the run" if kept is None else f"costs at most {counted(kept, 'finished step')}"
            lines.append(("trainer rank lost", cost))
        return lines


def status_of(run: Path) -> Status:
    """Read a run's folder; a ConfigError where it is none, or its config.yaml is damaged."""
    folder = RunFolder(run.resolve())
    options = saved_options(run)
    num_steps = options.get("run", {}).get("num_steps")
    if not isinstance(num_steps, int):
        raise ConfigError(f"{folder.config} holds no run.num_steps: it is not the options of a run")
    recent = last_rows(folder.metrics, NUM_RECENT)
    newest: JsonMapping = recent[-1] if recent else {}
    step = int(newest["step"]) if newest else None
    state, error = state_of(folder, step, num_steps)
    later = [row.get("step/total_s") for row in recent if row["step"] > 1]  # the first step compiles kernels
    seconds = [one for one in later if one is not None]
    is_going_on = state == "running" and step is not None and seconds
    checkpoints = complete_checkpoints(folder.checkpoints)
    judged = object_in(folder.checkpoints / "best.json")
    best = judged if judged.get("step") in [step_of(path) for path in checkpoints] else JsonObject()
    remote = object_in(folder.checkpoints / "remote.json")
    durable = remote.get("step") if remote else step_of(checkpoints[-1] if checkpoints else None)
    starts = [row for row in read_starts(folder.startup) if row.start == RUN]
    counted = [*(metric for metric, _ in _COUNTED), *(name for area, _ in _FAILED for name in failure_counts(area))]
    rows = read_figures(folder.metrics, {*COLUMNS, *counted})
    goodput = goodput_of(rows, [row.total_s for row in starts])
    return Status(
        run=str(folder.root),
        state=state,
        error=error,
        starting=start_of(folder),
        parts_before=tuple(file.name for file in parts_before(folder)),
        step=step,
        num_steps=num_steps,
        since_s=max(0.0, time.time() - folder.metrics.stat().st_mtime) if newest else None,  # clocks are set back
        left_s=(num_steps - (step or 0)) * statistics.median(seconds) if is_going_on else None,
        recent=_means([row for row in recent if row["step"]]),
        held_out=_held_out(read_figures(folder.evaluations)),
        counts={name: int(sum(row.get(name) or 0 for row in rows)) for name in counted},
        replicas_serving=newest.get("rollout/replicas_serving"),
        replicas_wanted=newest.get("rollout/replicas_wanted"),
        dashboard=dashboard_of(folder),
        checkpoint=step_of(checkpoints[-1]) if checkpoints else None,
        best={name: best[name] for name in ("step", "metric", "value") if name in best},
        remote=remote,
        loss_steps=max(0, step - (durable or 0)) if step else None,
        rank_loss_steps=newest.get("trainer/unkept_steps"),
        goodput={} if goodput is None else asdict(goodput),
        device=resolve_device(Device(options.get("cluster", {}).get("device", Device.auto))),
        start=tuple(line for row in starts[-1:] for line in describe(row)),
        log=_last_warnings(folder.log),
    )


def draw(run: Path) -> Path:
    """Draw curves.png of a run that goes on, as its end would. Returns the picture's path."""
    from slipstream.orchestrator.metrics.curves import PANELS, draw_curves

    folder = RunFolder(run.resolve())
    panels = PANELS[Objective(saved_options(run)["algorithm"]["objective"])]
    try:
        draw_curves(folder.metrics, folder.curves, panels)
    except OSError as error:
        raise ConfigError(f"--curves: {folder.curves} cannot be written: {error.strerror}") from error
    return folder.curves


def _means(rows: Sequence[JsonMapping]) -> dict[str, float]:
    """Metric -> its mean over those rows that have it, of what is shown."""
    names = [metric for metric, _, _ in (*_SHOWN, *_reward_parts(rows))]
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: statistics.fmean(found) for name, found in values.items() if found}


def _reward_parts(rows: Sequence[JsonMapping]) -> tuple[tuple[str, str, str], ...]:
    """As _SHOWN, what each reward gives where there are several; from the names in the newest row."""
    newest: JsonMapping = rows[-1] if rows else {}
    names = [name for name in newest if name.startswith("reward/") and name.endswith("_mean")]
    return tuple((name, f"  {name[7:-5]}", ".3f") for name in names) if len(names) > 1 else ()


def _held_out(evaluations: Sequence[JsonMapping]) -> dict[str, float]:
    """Figures of the first evaluation and of the newest one, and of each named set of the newest."""
    rows = [
        (figure, row["step"], row)
        for row in (*evaluations[:1], *evaluations[1:][-1:])
        for figure in ("reward", "nll", "dpo_loss")
        if row.get(f"eval/{figure}") is not None
    ]
    held_out = {f"eval/{figure} at step {step}": float(row[f"eval/{figure}"]) for figure, step, row in rows}
    for figure, step, row in rows[-1:]:
        held_out |= {f"eval/{name}/{figure} at step {step}": value for name, value in of_sets(row, figure).items()}
    return held_out


def _last_warnings(log: Path) -> tuple[str, ...]:
    """First lines. One that ends with a colon is followed by the last line of what it announces, as of a traceback."""
    if not log.is_file():
        return ()
    loud = deque[list[str]](maxlen=NUM_LOG_LINES)
    said: list[str] = []
    with log.open(errors="replace") as lines:
        for line in lines:
            if line[24:26] in ("W ", "E ", "I ", "D ") and line[:4].isdecimal():
                said = [line.rstrip()]
                if line[24] in "WE":
                    loud.append(said)
            elif said and said[0].endswith(":") and line.strip():
                said[1:] = [line.strip()]
    return tuple(" ".join(one) for one in loud)
