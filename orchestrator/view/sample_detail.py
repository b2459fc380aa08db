"""One sample, as the page shows it: segments of text that was given and of tokens that were sampled, a window of each.

    row of samples.jsonl --detail--> {figures, "segments": [{"given": text}, {"first": 0, "end": 31}, ...],
                                      "tokens": {"places": [...], "pieces": [...], "log_ratios": [...], ...}}

Owns: how turns, tokens and what a row left out fit together; how much is sent at once; the text of each token, by the
run's own tokenizer. Does not own: the form of a row (files/samples.py).
Invariant: no answer has more than MOST_TOKENS tokens and MOST_CHARS characters of each text, however long a row is.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from slipstream.conf.failures import outcome_of
from slipstream.conf.json_files import JsonObject, is_list
from slipstream.rollout.errors import TokenizerError
from slipstream.rollout.text.plain_text import TOKENIZER_FILE, load_tokenizer

MOST_TOKENS = 4000
MOST_CHARS = 20_000
_PREVIEW_CHARS = 160
FIGURES = (
    "step", "policy_version", "kind", "set", "group", "sibling", "prompt_id", "reward", "parts", "finish_reason",
    "num_tokens", "staleness", "mean_advantage", "k3", "k3_max", "failure", "versions",
)  # fmt: skip


def preview(row: JsonObject) -> str:
    """The end of the prompt and the start of the response, for a list."""
    prompt, response = _text(row, "prompt"), _text(row, "response")
    return f"{prompt[-_PREVIEW_CHARS // 2 :]} \u2192 {response[:_PREVIEW_CHARS]}"


def detail(
    row: JsonObject, pieces: Callable[[Sequence[int]], list[str]], *, first_token: int = 0, first_char: int = 0
) -> JsonObject:
    """What the page asks for when a sample is opened, and again for each further window, which begins at `first_token`
    of the row's lists and at `first_char` of each text."""
    token_ids = _list(row, "token_ids")
    window = range(first_token, min(first_token + MOST_TOKENS, len(token_ids)))
    places = _places(row, len(token_ids))
    return {
        **{name: row[name] for name in FIGURES if name in row},
        "segments": _segments(row, first_char, has_tokens=bool(token_ids)),
        "cut": row.get("cut"),
        "tokens": {
            "first": first_token,
            "total": len(token_ids),
            "places": [places[i] for i in window],
            "ids": [token_ids[i] for i in window],
            "pieces": pieces([token for i in window if isinstance(token := token_ids[i], int)]),
            "rollout_logprobs": _window(row, "rollout_logprobs", window),
            "log_ratios": _window(row, "log_ratios", window),
            "advantages": _window(row, "advantages", window),
            "versions": _versions(row, [places[i] for i in window]),
        },
    }


def _segments(row: JsonObject, first_char: int, *, has_tokens: bool) -> list[JsonObject]:
    """In the order in which they are read. `first` and `end` are places among all sampled tokens."""
    turns: list[JsonObject] = _list(row, "turns")
    if not turns:
        prompt = {"given": _cut(_text(row, "prompt"), first_char)}
        if has_tokens:
            return [prompt, {"first": 0, "end": row.get("num_tokens", 0)}]
        return [prompt, {"said": _cut(_text(row, "response"), first_char)}]
    segments: list[JsonObject] = []
    at = 0
    for number, turn in enumerate(turns):
        own = {"turn": number, "parent": turn.get("parent"), "reason": turn.get("reason", "")}
        segments.append({**own, "given": _cut(_text(turn, "given"), first_char)})
        if has_tokens and isinstance(count := turn.get("num_tokens"), int):
            segments.append({**own, "first": at, "end": at + count})
            at += count
        else:
            segments.append({**own, "said": _cut(_text(turn, "said"), first_char)})
    return segments


def _places(row: JsonObject, total: int) -> list[int]:
    """Place of each entry of the row's lists among all sampled tokens."""
    cut = row.get("cut")
    if not (is_list(cut) and len(cut) == 2):
        return list(range(total))
    first, end = (int(place) for place in cut)
    return [i if i < first else i - first + end for i in range(total)]


def _versions(row: JsonObject, places: Sequence[int]) -> list[int | None]:
    runs: list[tuple[int, int]] = _list(row, "versions")
    found: list[int | None] = []
    number, end = 0, int(runs[0][1]) if runs else 0
    for place in places:
        while number < len(runs) and place >= end:
            number += 1
            end += int(runs[number][1]) if number < len(runs) else 0
        found.append(int(runs[number][0]) if number < len(runs) else None)
    return found


def _window(row: JsonObject, name: str, window: range) -> list[Any]:
    values = _list(row, name)
    if len(values) == 1:
        return values * len(window)
    return [values[i] if i < len(values) else None for i in window]


def _cut(text: str, first: int) -> JsonObject:
    return {"text": text[first : first + MOST_CHARS], "from": first, "total": len(text)}


def _text(row: JsonObject, name: str) -> str:
    value = row.get(name, "")
    return value if isinstance(value, str) else str(value)


def _list(row: JsonObject, name: str) -> list[Any]:
    value = row.get(name)
    return value if is_list(value) else []


class TokenText:
    """The text of each token of a response. A token that ends inside a character has an empty piece; the token that
    completes it has the whole character. Without a tokenizer that can be read, a piece is the token's number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
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
