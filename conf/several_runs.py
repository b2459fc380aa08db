"""Several runs in one command line, as Hydra's users write them, are answered with the shell loop that makes them.

    a=1 b=2,3 -m --answer--> "... for b in 2 3; do slipstream train a=1 b=$b run.name=b-$b; done"

Hydra's own multirun would start every run in one process, where a run owns signals, the log and asyncio's loop, and
where one that fails ends the others. Pure.
"""

import re
import shlex
from collections.abc import Sequence

from hydra.errors import HydraException

from slipstream.conf.words import read_word

_MULTIRUN = ("-m", "--multirun")
_OF_HYDRA = ("hydra/", "hydra.launcher", "hydra.sweep", "hydra.mode")


def is_multirun(word: str) -> bool:
    return word in _MULTIRUN or word.lstrip("+~").startswith(_OF_HYDRA)


def answer(words: Sequence[str]) -> str:
    several = [word for word in words if values_of(word) is not None]
    first = next((word for word in words if is_multirun(word)), *several[:1])
    if not several:
        return f"{first}: a command starts one run, and none of its options has several values; remove it"
    return (
        f"{first}: a command starts one run, with one value per option; several runs are a loop of the shell: "
        f"{_loop(words)} (a text with a comma is quoted twice: 'name=\"a,b\"')"
    )


def values_of(word: str) -> list[str] | None:
    """Values of a word that has several, `a=1,2` or `a=range(1,4)`; None of any other word."""
    if not set(word) & set(",("):  # most words: parsing takes milliseconds
        return None
    try:
        override = read_word(word)
        return list(override.sweep_string_iterator()) if override.is_discrete_sweep() else None
    except HydraException:
        return None


def _loop(words: Sequence[str]) -> str:
    kept: list[str] = []
    label: list[str] = []
    loops: dict[str, list[str]] = {}
    for word in words:
        option, _, value = word.partition("=")
        values = values_of(word)
        if is_multirun(word):
            continue
        if values is not None:
            variable = re.sub(r"\W", "_", re.split(r"[./]", option)[-1])
            variable = variable if variable not in loops else re.sub(r"\W", "_", option.lstrip("+"))
            loops[variable] = values
            kept.append(f'{option}="${variable}"')
            if all(re.fullmatch(r"[\w.+-]+", one) for one in values):  # others are no part of a folder's name
                label.append(f"{variable}-${variable}")
        elif option.lstrip("+") == "run.name":
            label.insert(0, value)
        else:
            kept.append(shlex.quote(word))
    text = " ".join(["slipstream train", *kept, *([f'run.name="{"-".join(label)}"'] if label else [])])
    for variable, values in reversed(loops.items()):
        text = f"for {variable} in {shlex.join(values)}; do {text}; done"
    return text
