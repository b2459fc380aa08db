"""Goodput: the share of a run's GPU-seconds that went into trained tokens, and what the rest was lost to. Pure.

    trained tokens / (GPU-seconds that were there x the quiet rate of a GPU)

The quiet rate is the median, over the steps of this run that nothing disturbed, of trained tokens per second and GPU:
of the trainer's and the rollout workers' together, on CPUs of their processes. A step is disturbed when a rank or a
worker was started again or is missing in it, when it waited for an evaluation, when it was refused, and when it is the
first after a start.

Owns: these definitions. Does not own: the rows (step_rows.py, telemetry.py), starts (startup.py), what is shown of it.
Invariants: the share and the losses add up to one, and none is negative. Causes that explain more than was lost, since
other steps were faster than the median, are scaled down together; what none explains is "slower steps".
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.conf.json_files import JsonMapping

FEWEST_QUIET = 3
"""Steps that a quiet rate takes."""
_LEAST = 1e-9
"""A smaller share is one of rounding."""
START, RESUME = "start", "resumes, and steps made again"
RANKS, ENGINES = "trainer ranks started again", "rollout workers out of service"
WAITING, PUBLISH = "longer waits for rollouts", "longer publishes"
EVALUATION, BETWEEN = "waits for evaluations", "between steps (checkpoints)"
REFUSED, SLOWER = "refused steps", "slower steps"

LOST = ("step/total_s", "step/between_s", "step/redone_s")
_DISTURBING = ("trainer/restarts", "eval/wait_s", "optim/skipped", "step/redone_s")
_ENGINES = ("rollout/replicas_serving", "rollout/replicas_wanted", "rollout/restarts", "rollout/recoveries")
COLUMNS = frozenset((
    "step", "step/gpus", "trainer/num_tokens", "trainer/down_s", "rollout/wait_s", "sync/total_s",
    *LOST, *_DISTURBING, *_ENGINES,
))  # fmt: skip
"""What is read of a row."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Example: Goodput(0.91, 412.0, 14400.0, {"start": 0.06, "slower steps": 0.03})."""

    share: float
    quiet_tokens_per_gpu_s: float
    gpu_s: float
    """GPU-seconds that were there: starts, steps, and what was between them."""
    lost: dict[str, float]
    """Cause -> share; largest first."""


def goodput_of(rows: Sequence[JsonMapping], starts_s: Sequence[float] = ()) -> Goodput | None:
    """The goodput of these rows of metrics.jsonl, with the seconds of each start. None: there are too few quiet steps,
    or the rows are of a release that did not count their GPUs."""
    steps = [row for row in rows if row["step"] and row.get("step/gpus") and row.get("step/total_s")]
    quiet = [row for row in steps if _is_quiet(row)]
    if len(quiet) < FEWEST_QUIET:
        return None
    rate = statistics.median(_number(row, "trainer/num_tokens") / _gpu_s(row, "step/total_s") for row in quiet)
    if rate <= 0:
        return None
    started = [seconds * steps[0]["step/gpus"] for seconds in starts_s]
    gpu_s = sum(started) + sum(_gpu_s(row, name) for row in steps for name in LOST)
    done = [row for row in steps if not row.get("optim/skipped")]
    share = min(1.0, sum(_number(row, "trainer/num_tokens") for row in done) / rate / gpu_s)
    alone = [row for row in done if _lacks_engines(row)]
    others = [row for row in done if not _lacks_engines(row)]
    causes = {
        START: sum(started[:1]),
        RESUME: sum(started[1:]) + _sum(steps, "step/redone_s"),
        RANKS: _sum(done, "trainer/down_s"),
        ENGINES: _more(alone, quiet, "rollout/wait_s"),
        WAITING: _more(others, quiet, "rollout/wait_s"),
        PUBLISH: _more(done, quiet, "sync/total_s"),
        EVALUATION: _sum(done, "eval/wait_s"),
        BETWEEN: _sum(steps, "step/between_s"),
        REFUSED: _sum(steps, "step/total_s") - _sum(done, "step/total_s"),
    }
    return Goodput(share, rate, gpu_s, _shares(causes, 1.0 - share, gpu_s))


def _shares(causes: Mapping[str, float], lost: float, gpu_s: float) -> dict[str, float]:
    shares = {cause: seconds / gpu_s for cause, seconds in causes.items()}
    explained = sum(shares.values())
    if explained > lost:
        shares = {cause: share * lost / explained for cause, share in shares.items()}
    else:
        shares[SLOWER] = lost - explained
    return dict(
        sorted(((cause, share) for cause, share in shares.items() if share > _LEAST), key=lambda pair: -pair[1])
    )


def _is_quiet(row: JsonMapping) -> bool:
    is_first = row.get("step/between_s") is None
    return not (is_first or _lacks_engines(row) or any(row.get(name) for name in _DISTURBING))


def _lacks_engines(row: JsonMapping) -> bool:
    serving, wanted, restarts, recoveries = (row.get(name) or 0 for name in _ENGINES)
    return bool(serving < wanted or restarts or recoveries)


def _number(row: JsonMapping, name: str) -> float:
    return float(row.get(name) or 0.0)


def _gpu_s(row: JsonMapping, name: str) -> float:
    return _number(row, name) * row["step/gpus"]


def _sum(rows: Sequence[JsonMapping], name: str) -> float:
    return sum(_gpu_s(row, name) for row in rows)


def _more(rows: Sequence[JsonMapping], quiet: Sequence[JsonMapping], name: str) -> float:
    """GPU-seconds of it beyond those that as many quiet steps have."""
    usual = statistics.median(_number(row, name) for row in quiet)
    return max(0.0, sum((_number(row, name) - usual) * row["step/gpus"] for row in rows))
