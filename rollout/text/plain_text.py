"""Plain text to token ids: one rule for rows, for the conversations of agents, and for their plain prompts.

Owns: how a tokenizer.json is loaded, and which special tokens a text gets.
"""

from collections.abc import Container
from pathlib import Path

from tokenizers import Tokenizer

from slipstream.rollout.errors import TokenizerError

TOKENIZER_FILE = "tokenizer.json"
"""What prompts and responses are read with, by `tokenizers`."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, which cuts and pads nothing: some files say that it should. Raises: TokenizerError."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # the only class that `tokenizers` raises
        raise TokenizerError(str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """(token ids, the characters of `text` that each token has, as (start, stop)).

    Text that a template rendered before begins with the special tokens that the tokenizer adds, or ends with them. They
    are not added a second time, where any are to be added; (0, 0) is their place."""
    encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    ids, is_added = encoded.ids, encoded.special_tokens_mask
    num_before = next((place for place, added in enumerate(is_added) if not added), len(ids))
    num_after = next((place for place, added in enumerate(reversed(is_added)) if not added), 0)
    own = ids[num_before : len(ids) - num_after]
    first = num_before if own[:num_before] == ids[:num_before] else 0
    last = len(ids)
    if num_after and own[-num_after:] == ids[-num_after:]:
        last -= num_after
    return ids[first:last], encoded.offsets[first:last]


def encode_open(tokenizer: Tokenizer, text: str, ends: Container[int]) -> list[int]:
    """Token ids of a text that is to go on: as encode_text has them, without an end of sequence that the tokenizer adds
    behind it, after which a model would begin something else."""
    ids, places = encode_text(tokenizer, text, add_special_tokens=True)
    while ids and ids[-1] in ends and places[len(ids) - 1] == (0, 0):
        ids.pop()
    return ids
