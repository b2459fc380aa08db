"""`slipstream chaos`: draws from a seed whom to harm, how and when, does so, and shows what came of it.

    words --> ChaosOptions --check--> draw, event by event --> Harm.do --> RUN/chaos.jsonl, and a table

Owns: what may be asked of which run, the draw, the series and the table. Does not own: processes and moments
(victims.py), ways to harm (ways.py), the blow and its cost (harm.py). Invariant: the draw depends on the seed,
on the options and on the names of the run's processes, and on nothing else.
"""

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Objective
from slipstream.orchestrator.chaos.harm import ENDED, Blow, Event, Harm
from slipstream.orchestrator.chaos.victims import OUTLIVED, ROOMS, Kind, Moment, RunWatch, Victim, victims_of
from slipstream.orchestrator.chaos.ways import What, check_can_be_cut, check_can_be_filled, is_there
from slipstream.orchestrator.checkpoints.run_checkpoint import how_to_go_on
from slipstream.orchestrator.control.control_folder import is_alive
from slipstream.orchestrator.files.row_files import read_figures
from slipstream.orchestrator.files.run_folder import RunFolder, saved_options
from slipstream.orchestrator.metrics.goodput import COLUMNS, goodput_of

_Word = TypeVar("_Word", What, Moment)
_COLUMNS = (
    *("step", "what", "victim", "at", "met", "outcome"),
    *("longest step", "all after", "steps again", "groups again"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    run: Path
    victims: Sequence[str] = ()
    """Kinds or names to draw from; none: kinds whose death a run outlives by itself."""
    what: Sequence[str] = (What.kill,)
    when: Sequence[str] = (Moment.now,)
    seed: int | None = None
    """None: drawn, and said."""
    every: float | None = None
    for_s: float | None = None
    stop_s: float = 5.0
    rest_bytes: int = 0
    patience_s: float = 300.0
    resume: bool = False


def chaos(options: ChaosOptions, say: Callable[[str], None]) -> list[Event]:
    """Harm the run once, or again and again. Returns the events, which chaos.jsonl has, too. Raises ConfigError: it is
    no run that can be harmed, or not like that."""
    folder, saved = _living(options.run)
    what, when = _known(options.what, What, "--what"), _known(options.when, Moment, "--when")
    _check_numbers(options)
    _check_moments(when, saved, folder)
    chosen = _chosen(options, folder, when)
    _check_ways(chosen, what, folder, options.rest_bytes)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    say(f"seed {seed}: {', '.join(chosen)} x {', '.join(what)} x {', '.join(when)}")
    rng, events, began = random.Random(seed), list[Event](), time.monotonic()
    harm = Harm(
        folder, seed=seed, stop_s=options.stop_s, rest_bytes=options.rest_bytes, patience_s=options.patience_s,
        resumes=options.resume, say=say,
    )  # fmt: skip
    for number in range(1 << 31):
        blow = draw(rng, victims_of(folder), chosen, what, when, harm.publish_s)
        events.append(harm.do(blow, number))
        next_s = (number + 1) * (options.every or 0.0)
        if options.for_s is None or next_s >= options.for_s or events[-1].outcome == ENDED or not is_alive(folder.root):
            break
        time.sleep(max(0.0, began + next_s - time.monotonic()))
    return events


def draw(
    rng: random.Random, there: Sequence[Victim], chosen: Sequence[str], what: Sequence[What], when: Sequence[Moment],
    publish_s: float,
) -> Blow:  # fmt: skip
    """The next event. A kind is drawn first, then one of its processes, so that many of a kind are not hit more often.

    Args:
        there: the run's processes now; a name that is not among them (in a start) is taken as it is.
        chosen: kinds and names.
        publish_s: what a publish takes: blows at one are spread over it.
    """
    word = rng.choice(list(chosen))
    first = f"{word}-0" if word in (*OUTLIVED, Kind.keeper) else word  # where there is none of the kind yet
    names = sorted(one.name for one in there if word in (one.kind, one.name)) or [first]
    name, moment = rng.choice(names), rng.choice(list(when))
    after_s = rng.random() * publish_s if moment is Moment.publish else 0.0
    engines = sorted(one.name for one in there if one.kind is Kind.engine)
    others = [one for one in engines if one.rpartition("-")[2] != name.rpartition("-")[2]] or engines
    first = others[-1] if moment is Moment.recovery and others else ""
    kind = Kind(name.partition("-")[0])
    return Blow(kind, name, rng.choice([one for one in what if _fits(one, kind)]), moment, after_s, first)


def _fits(what: What, kind: Kind) -> bool:
    return (what is What.fill) == (kind in ROOMS)


def _check_ways(chosen: Sequence[str], what: Sequence[What], folder: RunFolder, rest_bytes: int) -> None:
    """Whether each victim can be harmed so, and nobody else is."""
    kinds = [Kind(word.partition("-")[0]) for word in chosen]
    for kind in kinds:
        if not any(_fits(one, kind) for one in what):
            cure = "with --what fill" if kind in ROOMS else "in another way; --what fill is for " + ", ".join(ROOMS)
            raise ConfigError(f"{kind} can be harmed only {cure}; got --what {','.join(what)}")
    for one in what:
        if not any(_fits(one, kind) for kind in kinds):
            raise ConfigError(f"--what {one} fits no VICTIM of {','.join(chosen)}; fill takes {', '.join(ROOMS)}")
    for room in (kind for kind in kinds if kind in ROOMS):
        check_can_be_filled(room, folder, rest_bytes)
    if What.cut in what:
        for one in victims_of(folder):
            if one.kind in chosen or one.name in chosen:
                check_can_be_cut(one.name, one.processes[0])


def listed(run: Path) -> list[JsonObject]:
    folder, _ = _living(run)
    found = victims_of(folder)
    if not found:
        raise ConfigError(f"the run in {folder.root} has no process on this machine; call it where the run is")
    rooms = [Victim(room, room, ()) for room in ROOMS if is_there(room, folder)]
    return [
        {"kind": one.kind, "name": one.name, "pids": one.pids, "outlived": one.kind in OUTLIVED}
        for one in (*found, *rooms)
    ]


def list_text(found: Sequence[JsonObject]) -> str:
    lines = [("VICTIM", "processes", "")]
    for one in found:
        pids = one["pids"]
        shown = ", ".join(map(str, pids[:6])) + (f", ... ({len(pids)})" if len(pids) > 6 else "")
        lines.append((one["name"], shown or "-", "" if one["outlived"] else "only if named"))
    return _table(lines)


def report(folder: Path, events: Sequence[Event], *, as_json: bool) -> str:
    goodput = goodput_of(read_figures(RunFolder(folder.resolve()).metrics, COLUMNS))
    if as_json:
        plain = None if goodput is None else asdict(goodput)
        return json.dumps({"events": [asdict(event) for event in events], "goodput": plain}, indent=2)
    lines: list[Sequence[str]] = [_COLUMNS]
    for one in events:
        outcome = f"{one.outcome}{', resumed' if one.resumed else ''}"
        seconds = ("-" if s is None else f"{s:.1f} s" for s in (one.longest_s, one.all_after_s))
        again = str(one.steps_again), str(one.groups_again)
        met = "yes" if one.met else "no"
        lines.append((str(max(0, one.step)), one.what, one.victim, one.asked, met, outcome, *seconds, *again))
    text = _table(lines) + "".join(f"\n{one.victim}: {one.why}" for one in events if one.why and one.outcome == ENDED)
    if goodput is not None:
        lost = ", ".join(f"{cause} {share:.1%}" for cause, share in goodput.lost.items() if share >= 0.0005)
        text += f"\n\ngoodput of the run's steps {goodput.share:.1%}" + (f"; lost to {lost}" if lost else "")
    return text


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{cell:<{n}}" for cell, n in zip(line, widths, strict=True)).rstrip() for line in lines)


def _living(run: Path) -> tuple[RunFolder, JsonObject]:
    """The folder and the options of a run that goes on and is this user's."""
    folder = RunFolder(run.resolve())
    saved = saved_options(run)
    control = folder.root / "control"
    if is_alive(folder.root) is None or (control.exists() and control.stat().st_uid != os.geteuid()):
        raise ConfigError(f"the run in {folder.root} belongs to another user, who alone may harm it; ask as that user")
    if not is_alive(folder.root):
        left = how_to_go_on(folder, saved.get("run", {}).get("num_steps"))
        raise ConfigError(f"the run in {folder.root} has ended: there is nothing to harm; {left}")
    return folder, saved


def _known(words: Sequence[str], kinds: type[_Word], option: str) -> list[_Word]:
    for word in words:
        if word not in list(kinds):
            raise ConfigError(f"{option} must be of {', '.join(kinds)}, got {word!r}; several are joined by commas")
    return [kinds(word) for word in words]


def _check_numbers(options: ChaosOptions) -> None:
    if (options.every is None) != (options.for_s is None):
        raise ConfigError("--every and --for go together, e.g. --every 60 --for 600; without both there is one event")
    if options.rest_bytes < 0:
        raise ConfigError(f"--rest-bytes must be >= 0, got {options.rest_bytes}")


def _check_moments(when: Sequence[Moment], saved: JsonObject, folder: RunFolder) -> None:
    run, objective = saved.get("run", {}), saved.get("algorithm", {}).get("objective", Objective.policy)
    with_engines = (Moment.sampling, Moment.publish, Moment.verify, Moment.recovery)
    for moment in when:
        if moment in with_engines and objective != Objective.policy:
            raise ConfigError(f"--when {moment}: the run is of algorithm={objective}, it has no rollout workers")
        if moment is Moment.checkpoint and not run.get("checkpoint_every_steps"):
            raise ConfigError("--when checkpoint: the run writes none before its end (run.checkpoint_every_steps=0)")
        if moment is Moment.start and RunWatch(folder).step >= 0 and not folder.starting.exists():
            raise ConfigError("--when start: the run has started; call it while slipstream status says starting")


def _chosen(options: ChaosOptions, folder: RunFolder, when: Sequence[Moment]) -> list[str]:
    """Kinds and names to draw from, all of which the run has."""
    there = victims_of(folder)
    kinds, names = [kind for kind in Kind if any(one.kind is kind for one in there)], {one.name for one in there}
    outlived = [kind for kind in kinds if kind in OUTLIVED]
    if not options.victims and not outlived and Moment.start not in when:
        raise _lacks("VICTIM", folder, kinds)
    for word in options.victims:
        if word.partition("-")[0] not in list(Kind):
            raise ConfigError(
                f"VICTIM must be of {', '.join(Kind)}, or a name of slipstream chaos RUN --list, got {word!r}"
            )
        if word not in (*kinds, *names, *ROOMS) and Moment.start not in when:
            raise _lacks(word, folder, kinds)
    return list(options.victims or outlived or [Kind.trainer])


def _lacks(word: str, folder: RunFolder, kinds: Sequence[Kind]) -> ConfigError:
    there = f"it has {', '.join(kinds)}" if kinds else "call it where the run's processes are"
    why = "; the Ray cluster that it uses is not its own" if word in (Kind.raylet, Kind.gcs, Kind.node) else ""
    return ConfigError(f"the run in {folder.root} has no {word} on this machine{why}; {there}")
