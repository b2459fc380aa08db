"""The text of each token of a response, with the run's own tokenizer.

Owns: how a sequence of token ids becomes as many pieces of text. Does not own: where ids come from.
A token that ends inside a character has an empty piece; the token that completes it has the whole character.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from slipstream.conf.failures import outcome_of
from slipstream.rollout.errors import TokenizerError
from slipstream.rollout.text.plain_text import TOKENIZER_FILE, load_tokenizer


class TokenText:
    """Pieces of text. Without a tokenizer that can be read, a token's piece is its number in brackets.

    Args:
        folder: the run's model/ folder, with tokenizer.json.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        tokenizer = self._loaded()
        if tokenizer is None:
            return [f"[{token}]" for token in token_ids]
        stream = DecodeStream(skip_special_tokens=False)
        found: list[str] = []
        for token in token_ids:
            text = outcome_of(stream.step, tokenizer, token)
            if isinstance(text, Exception):  # an id of another vocabulary
                text, stream = f"[{token}]", DecodeStream(skip_special_tokens=False)
            found.append(text or "")
        return found

    def _loaded(self) -> Tokenizer | None:
        if self._tokenizer is None and (self._folder / TOKENIZER_FILE).is_file():
            with contextlib.suppress(TokenizerError):  # numbers are shown instead
                self._tokenizer = load_tokenizer(self._folder)
        return self._tokenizer
