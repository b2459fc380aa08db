"""Where a response ends: the tokens that a model's folder calls an end.

    generation_config.json, config.json   eos_token_id, a number or a list
    tokenizer_config.json (or special_tokens_map.json)   eos_token, a text

All of them count. A model's files often name several, and not all name the same: a chat model whose configs still have
the end of a text, and whose tokenizer has the end of a turn. Engines end responses at them, evaluations and the
endpoint of agents too, and fine-tuning teaches one of them after each answer. Callers add
rollout.sampling.stop_token_ids, or leave all out (rollout.sampling.stop_at_eos=false).
"""

from pathlib import Path

from tokenizers import Tokenizer

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, is_list, read_json_object


def end_token_ids(folder: Path, tokenizer: Tokenizer | None = None) -> list[int]:
    """Every token that the folder calls an end, the tokenizer's first; empty if there is none. An id that is no token
    of the model is left out: files have -1 for none. `tokenizer` is the folder's, where the caller has loaded it.
    Raises: ConfigError, where a config has something else than numbers."""
    found = _tokenizer_end(folder, tokenizer)
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id")
        tokens = value if is_list(value) else [] if value is None else [value]
        if not all(type(token) is int for token in tokens):
            raise ConfigError(
                f"{folder / name}: eos_token_id must be the number of a token, or a list of them, got {value!r:.60}"
            )
        found += tokens
    size = vocab_size(folder)
    return [token for token in dict.fromkeys(found) if token >= 0 and (size is None or token < size)]


def vocab_size(folder: Path) -> int | None:
    """How many rows the embedding of the folder's model has; None where its config.json does not say."""
    size = _read(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None


def _tokenizer_end(folder: Path, tokenizer: Tokenizer | None) -> list[int]:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        file = folder / "tokenizer.json"
        if text and isinstance(text, str) and (tokenizer is not None or file.is_file()):
            number = (tokenizer or Tokenizer.from_file(str(file))).token_to_id(text)
            return [] if number is None else [number]
    return []


def _read(file: Path) -> JsonObject:
    return read_json_object(file) if file.is_file() else {}
