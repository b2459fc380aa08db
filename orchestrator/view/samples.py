"""Where each row of samples.jsonl is, what it is filtered and sorted by, which rows a page shows, in which order; and
one sample, as the page shows it: segments of text that was given and of tokens that were sampled, a window of each.

    row of samples.jsonl --detail--> {figures, "segments": [{"given": text}, {"first": 0, "end": 31}, ...],
                                      "tokens": {"places": [...], "pieces": [...], "log_ratios": [...], ...}}

Owns: what is kept in memory of a row (`ENTRY`), filters and orders by name; how turns, tokens and what a row left out
fit together; how much is sent at once; the text of each token, by the run's own tokenizer. Does not own: the form of a
row (metrics/samples.py), which rows are read (run_reader.py).
Invariants: every whole row is listed once, in order; a last line that is half-written is not there yet, and a line that
is no row is left out. No answer has more than MOST_TOKENS tokens and MOST_CHARS characters of each text, however long a
row is.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from slipstream.conf.errors import ConfigError
from slipstream.conf.failures import outcome_of
from slipstream.conf.json_files import JsonObject, is_list
from slipstream.orchestrator.files.row_files import of_rows_alone
from slipstream.rollout.errors import TokenizerError
from slipstream.rollout.text.plain_text import TOKENIZER_FILE, load_tokenizer

_WHOLE = ("offset", "length", "step", "kind", "flags", "num_turns", "num_tokens", "staleness", "prompt_id")
_FIGURES = ("reward", "advantage", "k3", "k3_max")
ENTRY = np.dtype([*((name, np.int64) for name in _WHOLE), *((name, np.float64) for name in _FIGURES)])
"""One row: bytes (with newline), step, numbers of KINDS, TRUNCATED and FAILED, and figures, NaN where there is none."""
Entries: TypeAlias = np.ndarray[Any, Any]
"""Rows of ENTRY."""
KINDS = ("training", "held-out")
TRUNCATED = 1
"""The response ended by length."""
FAILED = 2
"""There is no reward: it raised, timed out, or the episode failed."""


class _Row(msgspec.Struct):
    """What is read of a row. Rows of other versions may lack all but the step."""

    step: int
    kind: str = KINDS[0]
    finish_reason: str = ""
    turns: list[msgspec.Raw] = []
    num_tokens: int = 0
    staleness: int = 0
    prompt_id: int = 0
    reward: float | None = None
    mean_advantage: float | None = None
    k3: float | None = None
    k3_max: float | None = None


_DECODE = of_rows_alone(msgspec.json.Decoder(_Row).decode)


def extended(samples: Path, entries: Entries) -> Entries:
    """The entries, and those of the rows behind them; all anew if the file is another one by now. `entries`: From an
    earlier call, or empty."""
    try:
        with samples.open("rb") as file:
            if len(entries):
                file.seek(int(entries["offset"][-1]))
                last = _read(file.read(int(entries["length"][-1])))
                if last is None or last.step != entries["step"][-1]:
                    entries = entries[:0]
            start = int(entries["offset"][-1] + entries["length"][-1]) if len(entries) else 0
            file.seek(start)
            found: list[tuple[float, ...]] = []
            for line in file:
                if (row := _read(line)) is not None:
                    found.append(_entry(row, start, len(line)))
                start += len(line)
            return np.concatenate([entries, np.array(found, ENTRY)])
    except FileNotFoundError:
        return np.zeros(0, ENTRY)


def _read(line: bytes) -> _Row | None:
    return _DECODE(line) if line.endswith(b"\n") else None


def _entry(row: _Row, offset: int, length: int) -> tuple[float, ...]:
    flags = TRUNCATED * (row.finish_reason == "length") + FAILED * (row.reward is None)
    kind = KINDS.index(row.kind) if row.kind in KINDS else 0
    figures = (row.reward, row.mean_advantage, row.k3, row.k3_max)
    whole = (offset, length, row.step, kind, flags, len(row.turns), row.num_tokens, row.staleness, row.prompt_id)
    return *whole, *(np.nan if value is None else value for value in figures)


ORDERS: dict[str, tuple[str, bool]] = {
    "newest": ("step", True),
    "oldest": ("step", False),
    "worst k3": ("k3", True),
    "worst token k3": ("k3_max", True),
    "highest reward": ("reward", True),
    "lowest reward": ("reward", False),
    "highest advantage": ("advantage", True),
    "lowest advantage": ("advantage", False),
    "longest": ("num_tokens", True),
    "shortest": ("num_tokens", False),
    "stalest": ("staleness", True),
}
"""Order -> (field of the index, whether the largest comes first). Samples without that figure come last."""
FLAGS = {"truncated": TRUNCATED, "failed": FAILED}
PAGE = 50


@dataclass(frozen=True, slots=True)
class SampleQuery:
    """What is asked for. Example: SampleQuery(order="worst k3", first_step=100, flags=TRUNCATED)."""

    order: str = "newest"
    kind: str = ""
    """One of KINDS; "": all."""
    flags: int = 0
    """All of these flags are set."""
    has_turns: bool = False
    """Only episodes of agents."""
    first_step: int = 0
    last_step: int | None = None
    prompt_id: int | None = None
    page: int = 0


def parse_query(words: Mapping[str, str]) -> SampleQuery:
    """From the parameters of a URL. Raises ConfigError: one of them has a value that it cannot have."""
    order, kind = words.get("order", "newest"), words.get("kind", "")
    if order not in ORDERS:
        raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if kind and kind not in KINDS:
        raise ConfigError(f"kind must be one of {', '.join(KINDS)} or nothing, got {kind!r}")
    return SampleQuery(
        order=order,
        kind=kind,
        flags=sum(flag for name, flag in FLAGS.items() if words.get(name) == "1"),
        has_turns=words.get("turns") == "1",
        first_step=whole(words, "first_step") or 0,
        last_step=whole(words, "last_step"),
        prompt_id=whole(words, "prompt_id"),
        page=whole(words, "page") or 0,
    )


def whole(words: Mapping[str, str], name: str) -> int | None:
    """A parameter that is a whole number; None where it is not given. Raises ConfigError: it is something else."""
    word = words.get(name, "")
    if not word:
        return None
    if not (word.isascii() and word.isdigit()) or len(word) > 10:
        raise ConfigError(f"{name} must be a whole number, got {word!r}")
    return int(word)


def chosen(index: npt.NDArray[np.void], query: SampleQuery) -> npt.NDArray[np.intp]:
    """Numbers of all samples that are asked for, in order; equal ones newest first."""
    mask = index["step"] >= query.first_step
    if query.last_step is not None:
        mask &= index["step"] <= query.last_step
    if query.kind:
        mask &= index["kind"] == KINDS.index(query.kind)
    if query.flags:
        mask &= (index["flags"] & query.flags) == query.flags
    if query.has_turns:
        mask &= index["num_turns"] > 0
    if query.prompt_id is not None:
        mask &= index["prompt_id"] == query.prompt_id
    numbers = np.flatnonzero(mask)[::-1]
    name, is_descending = ORDERS[query.order]
    values = index[name][numbers].astype(np.float64)
    keys = np.where(np.isnan(values), np.inf, -values if is_descending else values)
    return numbers[np.argsort(keys, kind="stable")]


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
