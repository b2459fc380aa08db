"""Composes YAML files and command-line overrides into one RunConfig. The only place that sees a DictConfig.

    overrides --read--> (option, value) --Hydra--> DictConfig --to_object--> RunConfig --checks--> RunConfig
        |                    |                        |                         |            |
        '-- not NAME=VALUE   '-- unknown option,      '-- a YAML file is        '-- one      '-- options that contradict
                                 choice, wrong type       wrong                     section      (checks/), or have no
                                                                                                 effect (ignored.py)

Every arrow can refuse, always with a ConfigError that says which option, what was given, what is allowed and what to
do. Overrides are checked one by one before Hydra sees them, so that an error can name the word that caused it. What
Hydra still refuses comes from YAML files, and its errors are translated. Only conf/ and the user's config folder are
read, nothing is written, and the working directory does not change.
"""

import difflib
import functools
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from slipstream.conf.checks.ignored import check_no_override_is_ignored
from slipstream.conf.checks.sections import check_all
from slipstream.conf.elsewhere import CHOICES, REFUSED, counterpart, present_name
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig, is_list
from slipstream.conf.options import (
    CONF_DIR,
    GROUPS,
    Option,
    did_you_mean,
    group_choices,
    options_by_name,
    section_docs,
    show,
)
from slipstream.conf.register import register_schema, schema_node
from slipstream.conf.schema import Init, RunConfig
from slipstream.conf.schema.rules import with_article
from slipstream.conf.several_runs import answer, is_multirun, values_of
from slipstream.conf.words import read_word

_OF_ANOTHER_VERSION = ". A run of another version goes on with that one: environment.json names its commit"
_NOT_OF_THE_WHOLE_RUN = "its first line must be '# @package _global_', behind no byte order mark"
_NAMES_DATA = ("experiment=", "data=", "data.path=", "data.sources=")


def load_run_config(overrides: Sequence[str], config_dir: Path | None = None, *, reads_rows: bool = True) -> RunConfig:
    """Compose conf/config.yaml with overrides into a checked RunConfig.

    Args:
        overrides: Words of Hydra's grammar: `group=choice`, `section.option=value`, `+key=value`, `~key`.
        config_dir: A folder of the user's own YAML files, laid out like conf/ (`DIR/experiment/mine.yaml`).
        reads_rows: Whether the command needs data. If not, and no word names some, a file that ships stands in.

    Raises:
        ConfigError: An override, a YAML file or the resulting configuration cannot run.
    """
    _refuse_several_runs(overrides)
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(
            f"--config-dir {config_dir}: no such folder; give one laid out like conf/ (experiment/NAME.yaml)"
        )
    if not reads_rows and not any(word.lstrip("+").startswith(_NAMES_DATA) for word in overrides):
        overrides = [*overrides, "data.path=pkg://letters_train.jsonl"]
    parsed = [_read_override(text, config_dir) for text in overrides]
    try:
        if config_dir is None and all(o.type is not OverrideType.DEL and o.package is None for o in parsed):
            tree = _composed_of_presets(parsed)
        else:
            tree = _compose([_for_hydra(override) for override in parsed], config_dir)
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain_foreign(error)) from error
    except UnicodeDecodeError as error:  # one of the user's files; Hydra does not say which
        raise ConfigError(f"{_not_utf8(config_dir)} is not UTF-8 text; save the file as UTF-8") from error
    except RecursionError as error:  # Hydra follows the circle until Python stops it
        raise ConfigError(f"--config-dir {config_dir}: the `defaults` of a preset lead back to itself") from error
    assert isinstance(config, RunConfig)
    return _checked(config, parsed)


def _compose(words: Sequence[str], config_dir: Path | None = None) -> DictConfig:
    """Hydra's part. Raises: What Hydra, OmegaConf and PyYAML raise."""
    words = list(words)
    if config_dir is not None:
        words.append(f"hydra.searchpath=['file://{config_dir.resolve()}']")
    register_schema()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR), job_name="slipstream"):
        return compose(config_name="config", overrides=words)


@functools.lru_cache(maxsize=64)
def _presets(words: tuple[str, ...]) -> bytes:
    """Pickled: a copy out of that takes a fifth of the time of copy.deepcopy."""
    return pickle.dumps(_compose(words))


def _composed_of_presets(parsed: Sequence[Override]) -> DictConfig:
    """The same as `_compose`, without a user's folder, removals and packages. Choices of presets are composed once per
    process, which takes most of the time; options are set afterwards, as Hydra does."""
    groups = [override for override in parsed if override.key_or_group in GROUPS]
    tree: DictConfig = pickle.loads(_presets(tuple(map(_for_hydra, groups))))
    for override in parsed:
        if override.key_or_group not in GROUPS:
            OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
    return tree


def check_model_reads_overrides(config: RunConfig, overrides: Sequence[str], hf_config: HfConfig) -> None:
    """Refuse overrides that have no effect on a model on disk. (`load_run_config` does not read its config.json.)"""
    names = [read_word(word).key_or_group for word in overrides]
    check_no_override_is_ignored(config, names, hf_config)


def resolved_yaml(config: RunConfig) -> str:
    """Every option of the run with its final value, as YAML that `load_resolved_yaml` reads as an equal RunConfig."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def load_resolved_yaml(text: str, overrides: Sequence[str] = (), subject: str = "") -> RunConfig:
    """The RunConfig that `resolved_yaml` wrote, for example into a run folder, with overrides of single options.
    `subject` ("FILE: ") is put before an error about the text.

    Raises:
        ConfigError: The text is not a configuration of this version's schema, or an override or the result cannot run.
    """
    parsed = [_read_override(word, None) for word in overrides]
    for override in parsed:
        if override.key_or_group in GROUPS or override.type is OverrideType.DEL:
            raise ConfigError(
                f"{override.input_line}: the run has its options already, and takes no presets; set single options, "
                "as in run.num_steps=200"
            )
    try:
        tree = OmegaConf.merge(schema_node(), OmegaConf.create(text))
        for override in parsed:
            OmegaConf.update(tree, override.key_or_group, override.value(), force_add=True)
        config = OmegaConf.to_object(tree)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        cure = _OF_ANOTHER_VERSION if isinstance(error, ConfigKeyError) else ""
        raise ConfigError(subject + _explain_foreign(error) + cure) from error
    except (AssertionError, RecursionError) as error:  # OmegaConf's, of a number alone; lists in lists in lists
        raise ConfigError(f"{subject}it holds no options of a run") from error
    assert isinstance(config, RunConfig)
    return _checked(config, parsed)


def _checked(config: RunConfig, overrides: Sequence[Override]) -> RunConfig:
    is_model_known = config.model.init is Init.random and config.model.path is None
    names = [override.key_or_group for override in overrides]
    check_no_override_is_ignored(config, names, config.model.hf_config if is_model_known else None)
    check_all(config)
    return config


def _refuse_several_runs(words: Sequence[str]) -> None:
    """Answer `-m` and several values of an option with the loop that is meant; a list without its brackets is none."""
    if any(map(is_multirun, words)) or any(
        values_of(word) is not None and not _is_of_a_list(word.partition("=")[0].lstrip("+")) for word in words
    ):
        raise ConfigError(answer(words))


def _is_of_a_list(name: str) -> bool:
    option = options_by_name().get(name)
    return option is not None and option.type_label.startswith("list")


def _read_override(text: str, config_dir: Path | None) -> Override:
    """Parse one word of the command line, and check all that can be checked about it alone."""
    try:
        override = read_word(text)
    except HydraException as error:
        raise ConfigError(_explain_syntax(text, config_dir)) from error
    if override.is_sweep_override():
        if _is_of_a_list(override.key_or_group):
            raise ConfigError(f"{text}: a list is written in brackets: '{text.replace('=', '=[', 1)}]'")
        raise ConfigError(f"{text}: a run takes one value per option; quote a text with a comma, as in 'name=\"a,b\"'")
    name, value = override.key_or_group, override.value()
    if override.type is OverrideType.DEL:
        _check_removable(text, name)
    elif name in GROUPS:
        _check_choice(text, name, value, config_dir)
    elif (option := options_by_name().get(name)) is not None:
        _check_type(option, override)
    elif _open_dict_above(name) is None:
        raise ConfigError(_explain_unknown(name))
    return override


def _for_hydra(override: Override) -> str:
    """The word as Hydra takes it: users may set known names with or without `+`, but Hydra takes only one of these."""
    if override.type is OverrideType.DEL:
        return override.input_line or ""
    text = (override.input_line or "").lstrip("+")
    if override.key_or_group in GROUPS:
        return text
    return f"++{text}"


def _check_choice(text: str, group: str, value: object, config_dir: Path | None) -> None:
    if isinstance(value, dict):
        raise ConfigError(f"{text}: {group} is a section; set its options one by one, as in {_example_of(group)}")
    names = [choice.name for choice in group_choices(group, config_dir)]
    if str(value) not in names:
        hint = CHOICES.get(f"{group}={value}".lower()) or did_you_mean(str(value), names)
        if group == "model" and "/" in str(value):
            hint = f"Did you mean model=checkpoint model.path={value}?"
        if group == "data" and re.search(r"[./:]", str(value)):
            hint = f"Did you mean data=files data.path={value}?"
        if group == "reward" and (":" in str(value) or str(value).endswith(".py")):
            hint = f"Did you mean reward.kind={value}{'' if ':' in str(value) else ':FUNCTION'}?"
        absent = "" if config_dir is None else f", and --config-dir {config_dir} has no {group}/{show(value)}.yaml"
        raise ConfigError(
            f"{group}={show(value)}: {group} has no such choice{absent}.{' ' + hint if hint else ''} Choices: "
            f"{', '.join(names)}"
        )


def _check_type(option: Option, override: Override) -> None:
    """Refuse a value of the wrong type, by setting it in a tree of the schema, which takes only what fits."""
    value = override.value()
    if isinstance(value, str) and "${" in value:
        return  # an interpolation is resolved and checked after everything is composed
    if override.value_type is ValueType.ELEMENT and value == "" and option.type is not str:
        raise ConfigError(f"{option.name} must be {with_article(option.type_label)}, got nothing after the '='")
    try:
        OmegaConf.update(_tree_to_try_values(), option.name, value)
    except ValidationError as error:
        near = difflib.get_close_matches(str(value), option.choices, n=1, cutoff=0.75)  # `gpu` is no `cpu`
        hint = did_you_mean(str(value), near) or _as_integer(option, value) or _in_brackets(option, value)
        raise ConfigError(
            f"{option.name} must be {with_article(option.type_label)}, got {show(value)!r}{'. ' + hint if hint else ''}"
        ) from error


def _in_brackets(option: Option, value: object) -> str:
    """How a list is written, where that is what is missing; one of several has a length of its own."""
    if option.name == "data.path" and is_list(value):
        return f"Several are data.sources={show(value).replace(', ', ',')}"
    if not re.match(r"list of \D", option.type_label) or not isinstance(value, str | int | float):
        return ""
    try:
        OmegaConf.update(_tree_to_try_values(), option.name, [value])
    except ValidationError:
        return ""
    return f"A list of one is {option.name}=[{show(value)}]"


@functools.cache
def _tree_to_try_values() -> DictConfig:
    """One for all of them: making it takes a fifth of composing a run, and a value changes no option's type."""
    return schema_node()


def _as_integer(option: Option, value: object) -> str:
    """A size with a unit, `1GiB`, in bytes, and a whole number that was written as 1e6; empty for anything else."""
    if isinstance(value, float) and value.is_integer() and option.type_label == "integer":
        return f"Write {option.name}={int(value)}"
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B?", str(value), re.IGNORECASE)
    if size is None or not option.name.endswith("_bytes"):
        return ""
    unit = (1024 if size[3] else 1000) ** ("KMGT".index(size[2].upper()) + 1)
    return f"Write bytes: {option.name}={int(float(size[1]) * unit)}"


def _check_removable(text: str, name: str) -> None:
    if name in GROUPS or _open_dict_above(name) is not None:
        return
    if name in options_by_name():
        default = show(options_by_name()[name].default)
        raise ConfigError(f"{text}: an option cannot be removed; its default is {name}={default}")
    raise ConfigError(_explain_unknown(name))


def _open_dict_above(name: str) -> Option | None:
    """The option above `name` that takes any key, if there is one: model.hf_config for model.hf_config.vocab_size."""
    for option in options_by_name().values():
        if get_origin(option.type) is dict and name.startswith(f"{option.name}."):
            return option
    return None


def _explain_unknown(name: str) -> str:
    if (gone := _explain_gone(name)) is not None:
        return gone
    if name in section_docs():
        return f"{name} is a section; set its options one by one, as in {_example_of(name)}"
    return f"unknown option {name}. {_hint(name) or 'See all of them with: slipstream train --help options'}"


def _explain_gone(name: str) -> str | None:
    """What to say of an option that no run can have, or that earlier versions had; None: it is neither."""
    if name in REFUSED:
        return f"there is no option {name}; {REFUSED[name]}"
    ours = present_name(name)
    return None if ours is None else f"there is no option {name} any more; it is {ours} now"


def _hint(name: str) -> str:
    """What was probably meant: one of ours cut off, another library's name for one, or a misspelt one; or ""."""
    if begun := [option for option in options_by_name() if option.startswith(f"{name}_")]:
        return did_you_mean(name, begun)
    if (ours := counterpart(name)) is not None:
        return f"Here its counterpart is {ours} (docs/coming_from.md)"
    return did_you_mean(name, [*options_by_name(), *GROUPS])


def _explain_syntax(text: str, config_dir: Path | None) -> str:
    name = text.split("=", 1)[0].strip("+~ ")
    if text.startswith("-"):
        plain = name.strip("-").replace("-", "_")
        hint = _explain_gone(plain) or _hint(plain)
        return f"unknown flag {text}. Options are written section.option=value, without dashes. {hint}".rstrip()
    if "=" not in text:
        known = [f"{name}=VALUE"] if name in options_by_name() or name in GROUPS else []
        presets = (choice for group in GROUPS for choice in group_choices(group, config_dir))
        known += [f"{choice.group}={name}" for choice in presets if choice.name == name]
        cure = f"; write {' or '.join(known)}" if known else f". {_explain_unknown(name)}"
        return f"{text!r} is not NAME=VALUE{cure}"
    if not name.isascii() and _open_dict_above(name) is None:
        return _explain_unknown(name)
    if not name.isascii() or (not text.isascii() and "={" in text):
        return (
            f"cannot read {text!r}: here names are ASCII; give others in a YAML file, --config-dir DIR with "
            "DIR/experiment/NAME.yaml"
        )
    if "=~/" in text:
        return f"cannot read {text!r}: no shell makes a home folder of ~ there; write {text.replace('=~/', '=$HOME/')}"
    return (
        f"cannot read {text!r}: the value has characters with a meaning of their own (one of {{}}[]():,\\ or a quote); "
        f"quote it twice, as in '{name}=" + ('["..."]\'' if "=[" in text else '"..."\'')
    )


def _explain_foreign(error: BaseException) -> str:
    """One line for an error of Hydra, OmegaConf or PyYAML, which by now comes from a YAML file or an interpolation."""
    where = ""
    if isinstance(error, HydraException) and str(error).startswith("In '"):
        where = str(error).split("'")[1] + ".yaml: "
    if choice := re.search(r"Could not (?:find|load) '(\w+)/(\w+)'", str(error)):
        group, name = choice.groups()
        names = [known.name for known in group_choices(group)]
        hint = did_you_mean(name, names)
        listed = f"{hint}{' ' if hint else ''}Choices: {', '.join(names)}"
        return f"{where or 'a YAML file '}chooses {group}: {name}, which does not exist. {listed}"
    if "@experiment." in str(error):
        return where + _NOT_OF_THE_WHOLE_RUN
    cause = error
    while cause is not None and not isinstance(cause, (OmegaConfBaseException, yaml.YAMLError)):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        name = str(cause.full_key)
        option = options_by_name().get(name)
        if name.partition(".")[0] == "experiment":
            return where + _NOT_OF_THE_WHOLE_RUN
        if isinstance(cause, ValidationError) and option is not None:
            return f"{where}{name} must be {with_article(option.type_label)}. {_first_line(cause)}"
        if option is None and _open_dict_above(name) is None:
            return where + _explain_unknown(name)
        return f"{where}{name}: {_first_line(cause)}"
    return where + _first_line(cause or error)


def _not_utf8(folder: Path | None) -> Path | None:
    """The first YAML file of the folder that is not UTF-8; the folder if none is found."""
    for path in sorted(folder.rglob("*.yaml")) if folder is not None else ():
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError:
            return path
    return folder


def _first_line(error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        file = "" if mark.name.startswith("<") else f"{mark.name}, "  # text that came from no file
        return f"not valid YAML at {file}line {mark.line + 1}: {error.problem}"
    if misplaced := re.search(r"is not a subclass of \w+\. value: (.*)", str(error)):
        return f"the value {misplaced[1]} stands in the place of a section, as trainer in trainer: {{num_ranks: 2}}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _example_of(section: str) -> str:
    option = next(option for option in options_by_name().values() if option.name.startswith(f"{section}."))
    return f"{option.name}={show(option.default)}"
