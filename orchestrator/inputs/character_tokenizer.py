"""The character tokenizer (`model.tokenizer=characters`): one token per character and four special tokens.

    0 <pad>   1 <bos>   2 <eos>   3 <unk>   4 space   5..30 a-z   31..40 0-9   41.. newline, punctuation, A-Z, the rest

cut after `vocab_size` entries, so a vocabulary of 64 holds lower case, digits and the first 23 of the punctuation. The
table is fixed: a character has the same id in every run. Text is prefixed with <bos> unless the caller says no.

Needs `tokenizers`, not torch.
"""

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slipstream.conf.errors import ConfigError

CHARACTERS = "characters"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
ALPHABET = (
    " "
    + string.ascii_lowercase
    + string.digits
    + "\n=+-*/.,:;?!()<>[]'\"_#"
    + string.ascii_uppercase
    + "&|%$@^~{}\\`\t"
)
"""Printable ASCII, the characters that small tasks use first."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""`role: content`, a line for each message; an answer ends with <eos>. A vocabulary of 64 has all its characters."""


def known_characters(vocab_size: int) -> frozenset[str]:
    """Characters that have a token of their own; all others are <unk>."""
    return frozenset(ALPHABET[: max(0, vocab_size - len(SPECIAL_TOKENS))])


def check_character_vocabulary(vocab_size: int) -> None:
    """Raise ConfigError unless there is room for the special tokens and one character."""
    fewest = len(SPECIAL_TOKENS) + 1
    if vocab_size < fewest:
        raise ConfigError(f"model.tokenizer=characters needs model.hf_config.vocab_size >= {fewest}, got {vocab_size}")


def save_character_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """Write the character tokenizer, in the format that `tokenizers`, transformers and vLLM all read."""
    check_character_vocabulary(vocab_size)
    entries = [*SPECIAL_TOKENS, *ALPHABET][:vocab_size]
    pad, bos, eos, unk = SPECIAL_TOKENS
    tokenizer: Any = Tokenizer(models.WordLevel({token: i for i, token in enumerate(entries)}, unk_token=unk))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(description, indent=2) + "\n")
