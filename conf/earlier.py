# pyright: strict
"""Options of earlier releases: what each is called now, or what to do where it is no more.

    command line                   an old name is refused, with the new one
    config.yaml of an old run      an old name is read as the new one; a value that every run has now is dropped; any
                                   other is refused, in one line that says how to go on

Owns: both tables. Does not own how options are read (load.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from conf.errors import ConfigError

MOVED = {
    **{
        f"rollout.eval_{name}": f"rollout.eval.{name}"
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed")
    },
}
"""Old name -> the name that takes the same values."""


class Gone(NamedTuple):
    """An option without a successor of the same values."""

    cure: str
    """What to do in its place; ends "there is no option NAME any more; "."""
    values: tuple[object, ...] = ()
    """What it may be in the folder of an old run, because every run has it now."""


def _shaped(name: str, neutral: float) -> Gone:
    return Gone(
        "training refuses it, because engines return log-probabilities of what it leaves or makes of the distribution, "
        "and the trainer's are of the whole softmax(logits / temperature), so that ratios, importance weights and "
        f"parity/k3 would compare two policies; for evaluations set rollout.eval.{name}",
        (neutral,),
    )


GONE: Mapping[str, Gone] = {
    "algorithm.tis_max": Gone(
        "set algorithm.correction=tis and algorithm.correction_max, or algorithm.correction=none where it was 0"
    ),
    "algorithm.advantage_scale": Gone("set algorithm.advantage: group_std for std, group for none, or leave_one_out"),
    "rollout.sampling.top_p": _shaped("top_p", 1),
    "rollout.sampling.top_k": _shaped("top_k", 0),
    "rollout.sampling.min_p": _shaped("min_p", 0),
    "rollout.sampling.repetition_penalty": _shaped("repetition_penalty", 1),
    "rollout.sampling.presence_penalty": _shaped("presence_penalty", 0),
}


def explain(name: str) -> str | None:
    """What to say of an option of an earlier release on the command line; None: there was none of this name."""
    if name in MOVED:
        return f"there is no option {name} any more; it is {MOVED[name]} now"
    return f"there is no option {name} any more; {GONE[name].cure}" if name in GONE else None


def carried_over(options: dict[str, Any]) -> dict[str, Any]:
    """The options of an old run under the names of this release. Changes and returns `options`.

    Args:
        options: Section by section, as in config.yaml.

    Raises:
        ConfigError: The run depends on an option that is no more.
    """
    for old, new in MOVED.items():
        if (value := _take(options, old)) is not _ABSENT:
            _put(options, new, value)
    for name, gone in GONE.items():
        value = _take(options, name)
        if value is not _ABSENT and value not in gone.values:
            raise ConfigError(
                f"the run has {name}={value}, and there is no such option any more; {gone.cure}, and give "
                "run.resume=FOLDER to slipstream train, or go on with the release that began the run"
            )
    return options


_ABSENT = object()


def _take(options: dict[str, Any], name: str) -> object:
    """Remove an option and return its value, or _ABSENT."""
    first, _, rest = name.partition(".")
    if not rest:
        return options.pop(first, _ABSENT)
    below = options.get(first)
    return _take(cast("dict[str, Any]", below), rest) if isinstance(below, dict) else _ABSENT


def _put(options: dict[str, Any], name: str, value: object) -> None:
    first, _, rest = name.partition(".")
    if rest:
        _put(options.setdefault(first, {}), rest, value)
    else:
        options[first] = value
