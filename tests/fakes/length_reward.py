"""A reward whose gradient is known: the response's length in tokens of the character tokenizer."""

import re
from typing import Any


def num_tokens(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Needs reward.keep_special_tokens: every special token, like <eos>, is one token."""
    return float(len(re.sub(r"<(pad|bos|eos|unk)>", "#", response)))
