"""Who waited for whom in one step, from its row of timeline.jsonl. Pure.

    trainer    |--- wait for rollouts ---|-- forward and backward --|- optimizer -|- publish -|
    rollout-0  |--- samples ----|        idle ........................................|paused-|
    rollout-1  |--- samples ----------|  idle ........................................|paused-|
    rewards                    judge  |--|

Owns: what is concluded. Does not own: what was noted (files/timeline.py).
The last response of a batch is what the trainer waited for. A worker without a request is idle; it waits for whatever
the trainer does meanwhile, because no group may be sampled before that (the staleness bound), or for its requests to be
made at all.
"""

from collections.abc import Sequence
from typing import Any

from slipstream.conf.json_files import JsonObject

Span = Sequence[Any]
WAIT = "wait for rollouts"
SHORTEST_IDLE_S = 0.001


def concluded(row: JsonObject) -> JsonObject:
    """What the page says about a step. Returns "seconds" of the step; "waits": sentences; "idle": worker -> [from, to,
    what the trainer did meanwhile]."""
    spans: list[Span] = [span for span in row.get("spans", []) if isinstance(span, list)]
    seconds = float(row.get("to", 0.0)) - float(row.get("from", 0.0))
    trainer = [span for span in spans if span[0] == "trainer"]
    publish: JsonObject = row.get("publish") or {}
    replicas: list[Any] = publish.get("replicas", [])
    workers = {f"rollout-{number}" for number in range(len(replicas))}  # one that sampled nothing is idle, too
    workers = sorted(workers | {str(span[0]) for span in spans if str(span[0]).startswith("rollout-")})
    idle = {worker: _idle(spans, worker, trainer, seconds) for worker in workers}
    return {"seconds": seconds, "waits": [*_trainer_waits(spans, trainer), *_worker_waits(idle)], "idle": idle}


def _trainer_waits(spans: Sequence[Span], trainer: Sequence[Span]) -> list[str]:
    said: list[str] = []
    for _, what, begin, end, _ in trainer:
        if what != WAIT or end - begin < SHORTEST_IDLE_S:
            continue
        said.append(f"The trainer waited {end - begin:.2f} s for rollouts{_last_before(spans, end)}.")
    return said


def _last_before(spans: Sequence[Span], end: float) -> str:
    """Which prompt came last, and who was at it."""
    judged = [span for span in spans if span[0] == "rewards" and span[3] <= end + SHORTEST_IDLE_S]
    if not judged:
        return ""
    _, _, judged_from, judged_to, prompt = max(judged, key=lambda span: span[3])
    sampled = [
        span for span in spans if span[4] == prompt and span[1] == "sample" and span[3] <= judged_from + SHORTEST_IDLE_S
    ]
    if not sampled:
        return f"; last came prompt {prompt}, judged in {judged_to - judged_from:.2f} s"
    worker, _, begin, finish, _ = max(sampled, key=lambda span: span[3])
    return (
        f"; last came prompt {prompt}: {worker} sampled it in {finish - begin:.2f} s, "
        f"the rewards judged it in {judged_to - judged_from:.2f} s"
    )


def _worker_waits(idle: dict[str, list[tuple[float, float, str]]]) -> list[str]:
    said: list[str] = []
    for worker, gaps in idle.items():
        by_cause: dict[str, float] = {}
        for begin, end, cause in gaps:
            by_cause[cause] = by_cause.get(cause, 0.0) + end - begin
        total = sum(by_cause.values())
        if total >= SHORTEST_IDLE_S:
            parts = ", ".join(f"{seconds:.2f} s during {cause}" for cause, seconds in by_cause.items())
            said.append(f"{worker} had nothing to sample for {total:.2f} s: {parts}.")
    return said


def _idle(
    spans: Sequence[Span], worker: str, trainer: Sequence[Span], seconds: float
) -> list[tuple[float, float, str]]:
    """Stretches of the step without a request, cut where the trainer began with something else."""
    busy = sorted((max(span[2], 0.0), min(span[3], seconds)) for span in spans if span[0] == worker)
    gaps: list[tuple[float, float]] = []
    at = 0.0
    for begin, end in [*busy, (seconds, seconds)]:
        if begin - at >= SHORTEST_IDLE_S:
            gaps.append((at, begin))
        at = max(at, end)
    cut: list[tuple[float, float, str]] = []
    for begin, end in gaps:
        for _, what, other_begin, other_end, _ in trainer:
            first, last = max(begin, other_begin), min(end, other_end)
            if last - first >= SHORTEST_IDLE_S:
                cut.append((first, last, _CAUSES.get(what, f"the trainer's {what}")))
    return cut


_CAUSES = {
    WAIT: "the trainer's wait for other workers and rewards",
    "wait for the evaluation": "the evaluation's wait for other workers",
    "publish": "the publish",
}
