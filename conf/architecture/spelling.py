"""Misspelt fields of a model's config, found by what its family's reader asks for. Pure data, no torch."""

import difflib
from collections.abc import Collection

from slipstream.conf.architecture.config_fields import Fields
from slipstream.conf.architecture.families import read_config
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject

_OF_ANY_MODEL = {
    *("architectures", "initializer_range", "max_position_embeddings", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Fields that are read elsewhere."""


def check_spelling(config: JsonObject, given: Collection[str], *, each_is_read: bool = False) -> None:
    """Refuse a field that a person gave, that is not read, and whose name is almost that of a field that is. Fields
    that only the engine reads may have any name, unless `each_is_read`: a config.json has many.

    Raises:
        ConfigError: Names the first such field and the field that was probably meant.
    """
    fields = Fields(config)
    read_config(fields)
    for name in sorted(set(given) - fields.asked - _OF_ANY_MODEL):
        meant = next((known for known in sorted(fields.asked) if _is_misspelling(name, known)), None)
        if meant is not None or each_is_read:
            told = f"this model does not have. Did you mean {meant}?" if meant else "nobody reads; remove it"
            raise ConfigError(f"model.hf_config.{name} is a field that {told}")


def _is_misspelling(name: str, known: str) -> bool:
    """Whether both have equally many words, each nearly the same. With a word more, or another word, it is another
    field: (moe_)intermediate_size."""
    words, known_words = name.split("_"), known.split("_")
    if len(words) != len(known_words):
        return "".join(words) == "".join(known_words)
    likeness = [difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(words, known_words, strict=True)]
    return min(likeness) >= 0.6 and sum(likeness) >= len(words) - 0.5
