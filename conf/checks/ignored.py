"""Refuses an option that the user typed and that has no effect in his run. Presets may set what a run does not use.

Owns: what is said, and reasons about many options at once. Does not own: when an option is read, which its field says
(read_if of conf/schema/rules.py), or options that contradict each other (sections.py). Pure: it sees a RunConfig, the
names that a user typed, and config.json; while that is not read yet, nothing is said of an architecture.
"""

import functools
import operator
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import get_type_hints

from slipstream.conf.architecture.families import kind_of
from slipstream.conf.architecture.spelling import check_spelling
from slipstream.conf.checks.tensor_parallel import num_experts_of
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig
from slipstream.conf.options import show
from slipstream.conf.schema import AlgorithmConfig, Objective, RewardPart, RunConfig
from slipstream.conf.schema.rules import READ_IF, REMOVE_ONE, If

READ_BY_POLICY_ALONE = (
    *("rollout.", "weight_sync.", "parity.", "reward", "reward.", "data.max_prompt_tokens"),
    *(f"run.{name}" for name in ("eval_samples_per_prompt", "eval_right_from", "eval_beside")),
    *("run.samples_per_step", "algorithm.teacher."),
    *(
        f"algorithm.{item.name}"
        for item in fields(AlgorithmConfig)
        if item.name not in ("objective", "sequences_per_step", "normalization", "dpo_beta")
    ),
)
"""Options and sections that learning from given answers, sft or dpo, does not read."""
OF_ONE_REWARD = ("reward.judge.", "reward.code.", *(f"reward.{item.name}" for item in fields(RewardPart)))


def check_no_override_is_ignored(config: RunConfig, names: Collection[str], hf_config: HfConfig | None = None) -> None:
    """Refuse an option that the user typed and that has no effect in this run, with all others that have none for the
    same reason.

    Args:
        names: Dotted names from the command line, groups included.
        hf_config: config.json of the model; None: not read yet.
    """
    told = {name: reason for name in names if (reason := next(_reasons(config, name, hf_config), None)) is not None}
    for by_what, cure in told.values():
        alike = [name for name, reason in told.items() if reason == (by_what, cure)]
        has, cure = ("has", cure) if len(alike) == 1 else ("have", cure.replace("remove it", "remove them"))
        raise ConfigError(f"{', '.join(alike)} {has} no effect with {by_what}; {cure}")
    known = dict(hf_config or {})  # a field that was removed is not in it
    if typed := {name.split(".")[2] for name in names if name.startswith("model.hf_config.")} & known.keys():
        check_spelling(known, typed, each_is_read=True)


def is_read(config: RunConfig, name: str) -> bool:
    """Whether an option has an effect in this run, whatever its architecture."""
    return not any(_reasons(config, name, None))


def _reasons(config: RunConfig, name: str, hf_config: HfConfig | None) -> Iterator[tuple[str, str]]:
    for subjects, by_what, cure in _reasons_about_many(config):
        if any(name == one or (one.endswith(".") and name.startswith(one)) for one in subjects):
            yield by_what, cure
    for one in conditions_of(name):
        if one.condition == "has_experts=true":
            if hf_config is not None and num_experts_of(hf_config) == 0:
                yield f"model_type={kind_of(hf_config)}{one.told}", "remove it"
        elif not any(_holds(config, part) for part in one.condition.split(" or ")):
            yield _by_what(config, one), _cure(one)


def _reasons_about_many(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Options, and sections with a dot at the end, that this run does not read; why; and the cure."""
    objective = config.algorithm.objective
    if objective is not Objective.policy:
        why = f"algorithm={objective}, which starts no engines and judges no rollouts"
        yield READ_BY_POLICY_ALONE, why, "remove it, or choose algorithm=grpo"
    if config.reward.parts:
        cure = "set it in reward.parts.NAME, or remove reward.parts"
        yield OF_ONE_REWARD, "reward.parts, each of which has its own", cure


@functools.cache
def conditions_of(name: str) -> tuple[If, ...]:
    """What the field of an option and the sections around it say of when it is read. A config group has none."""
    section: object = RunConfig
    found: tuple[If, ...] = ()
    for part in name.split("."):
        if not (isinstance(section, type) and is_dataclass(section)):
            break  # a key of a mapping
        found += next((item.metadata.get(READ_IF, ()) for item in fields(section) if item.name == part), ())
        section = get_type_hints(section).get(part)
    return found


def _parsed(condition: str) -> tuple[str, str, str]:
    parsed = re.fullmatch(r"([\w.]+?)(!?=)(.*)", condition)
    assert parsed is not None, condition
    return parsed[1], parsed[2], parsed[3]


def _holds(config: RunConfig, condition: str) -> bool:
    name, sign, values = _parsed(condition)
    text = _shown(config, name)
    found = (text, *text.strip("[]").split(","))  # of a list its items, too
    return (sign == "=") is any(fnmatchcase(item, one) for item in found for one in values.split("|"))


def _shown(config: RunConfig, name: str) -> str:
    value: object = operator.attrgetter(name)(config)
    return f"{value:g}" if isinstance(value, float) else show(value).replace(", ", ",")


def _by_what(config: RunConfig, one: If) -> str:
    if one.told and one.told[0] not in ",:":
        return one.told
    name = _parsed(one.condition.split(" or ")[0])[0]
    return f"{name}={_shown(config, name)}{one.told}"


def _cure(one: If) -> str:
    if one.cure == REMOVE_ONE:
        return one.cure
    if one.cure.startswith(":"):
        return f"remove it{one.cure}"
    name, sign, values = _parsed(one.condition.split(" or ")[0])
    return f"remove it, or {one.cure or ('set ' + name + ('=' + values.split('|')[0] if sign == '=' else ''))}"
