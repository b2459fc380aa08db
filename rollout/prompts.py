"""Prompts: from a JSONL or Parquet file to tokenized `Prompt`s, in a seeded order that a resumed run continues.

Owns: reading and checking the file (every row, before the run starts) and the order of prompts in each epoch. Does not
own tokenizers (an `Encoder` is passed in) nor what is done with a prompt. No torch.
Invariant: the order depends only on seed, epoch and the number of rows, so a cursor is two integers.

A row is an object with a `prompt` column (text, or a list of chat messages) and any further columns, which rewards see:

    {"prompt": "k 3 a =", "answer": "a"}
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

import conf
from rollout.errors import DataError
from rollout.types import Prompt

_HEAD_CHARACTERS_PER_TOKEN = 16
"""A text with more characters per allowed token is tokenized only after its beginning alone was not too long."""
PACKAGED = "pkg://"
"""Prefix of prompt files that ship in conf/data."""


class Encoder(Protocol):
    """What turns text into token ids; `orchestrator.inputs.text_encoder.TextEncoder` in a run, ten lines in tests."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text."""
        ...

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Chat messages as the model sees them, ending where its answer begins."""
        ...


def resolve_path(path: str) -> Path:
    """`pkg://NAME` is conf/data/NAME; anything else starts at the working directory."""
    if path.startswith(PACKAGED):
        return Path(conf.__file__).parent / "data" / path.removeprefix(PACKAGED)
    return Path(path)


def read_prompts(
    path: str, encoder: Encoder, *, prompt_key: str = "prompt", max_prompt_tokens: int, add_special_tokens: bool = True
) -> list[Prompt]:
    """Read, check and tokenize every row of a prompt file, in file order.

    Args:
        path: A .jsonl or .parquet file, or `pkg://NAME`.
        encoder: Tokenizer and chat template.
        prompt_key: Column that holds the prompt.
        max_prompt_tokens: Longer prompts are refused.
        add_special_tokens: For plain text; chat templates bring their own.

    Raises:
        DataError: The file is missing, empty or malformed, or a row cannot be a prompt. Names the file and the line
            (JSONL, from 1) or row (Parquet, from 0).
    """
    file = resolve_path(path)
    prompts: list[Prompt] = []
    for where, row in read_rows(file):
        text, add_special = _text_of(row, where, encoder, prompt_key, add_special_tokens)
        token_ids, is_whole = encode_up_to(
            max_prompt_tokens, text, partial(encoder.encode, add_special_tokens=add_special)
        )
        if len(token_ids) > max_prompt_tokens:
            count = f"{len(token_ids)}" if is_whole else f"{len(text)} characters, more than {max_prompt_tokens}"
            raise DataError(
                f"{where}: the prompt has {count} tokens, data.max_prompt_tokens allows {max_prompt_tokens}; shorten "
                "it, or raise data.max_prompt_tokens (and rollout.max_model_len with it)"
            )
        if not token_ids:
            raise DataError(f"{where}: the prompt has no tokens")
        fields = {key: value for key, value in row.items() if key != prompt_key}
        _check_plain(fields, where)
        messages = row[prompt_key] if isinstance(row[prompt_key], list) else None
        prompts.append(Prompt(len(prompts), tuple(token_ids), text, fields, messages))
    if not prompts:
        raise DataError(f"prompt file {file} has no rows")
    return prompts


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row of a JSONL or Parquet file with its place, for messages.

    Raises:
        DataError: The file is missing, malformed, or of another kind.
    """
    if not file.is_file():
        raise DataError(
            f"prompt file {file} {'is a folder' if file.is_dir() else 'does not exist'}; set data.path (or "
            "data.eval_path) to a .jsonl or .parquet file"
        )
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if file.suffix not in readers:
        raise DataError(f"prompt file {file} must end in .jsonl or .parquet, got {file.suffix or 'no ending'!r}")
    yield from readers[file.suffix](file)


def encode_up_to(limit: int, text: str, encode: Callable[[str], list[int]]) -> tuple[list[int], bool]:
    """(token ids, whether they are the whole text's). If a text is far longer than the limit, only its beginning is
    tokenized, because megabytes take minutes.
    """
    head = text[: _HEAD_CHARACTERS_PER_TOKEN * (limit + 1)]
    if len(head) < len(text):
        token_ids = encode(head)
        if len(token_ids) > limit + 1:  # the cut may have added one token
            return token_ids, False
    return encode(text), True


def check_text(text: str, where: str) -> None:
    """Refuse what JSON allows but a text cannot contain: half of a surrogate pair, which tokenizers refuse, and NUL.

    Raises:
        DataError: Names the place and the character.
    """
    if (nul := text.find("\0")) >= 0:
        raise DataError(f"{where}: character {nul + 1} of the text is NUL; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DataError(
            f"{where}: character {e.start + 1} of the text is {text[e.start]!a}, half of a surrogate pair; an "
            "escape was cut in two, or is of another encoding"
        ) from e


def _check_plain(fields: dict[str, Any], where: str) -> None:
    """Refuse columns that JSON cannot hold: rewards and checkpoints get a row as JSON, and Parquet has more types."""
    for name, value in fields.items():
        try:
            json.dumps(value)
        except TypeError as e:
            raise DataError(
                f"{where}: column {name!r} holds what rewards cannot be given ({e}): text, numbers, true and false, "
                "null, and lists and structs of these are allowed; write the column as text"
            ) from e


class Tokenized(Protocol):
    """An item of a stream. The digest of the stream's order is computed from its token ids."""

    @property
    def token_ids(self) -> Sequence[int]: ...


Item = TypeVar("Item", bound=Tokenized)


class Shuffled(Generic[Item]):
    """An endless sequence of items (prompts, conversations): epoch after epoch, each in its own order.

    Example: three items may come as 2 0 1 | 0 2 1 | ...; after four of them the cursor is epoch 1, position 1.

    Args:
        items: At least one.
        seed: Together with the epoch, it decides the order.
        shuffle: False keeps the file's order in every epoch.
    """

    def __init__(self, items: Sequence[Item], *, seed: int, shuffle: bool = True) -> None:
        if not items:
            raise DataError("a stream needs at least one prompt or conversation")
        self.items = list(items)
        self._seed = seed
        self._shuffle = shuffle
        self._digest = _digest(self.items)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Epoch of the next item, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self.items[self._order[self._position]]
        self._position += 1
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return item

    def state_dict(self) -> dict[str, Any]:
        """The cursor: plain values, to be stored with a checkpoint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "digest": self._digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: The prompts, the seed or the shuffling differ: the cursor would point at other prompts.
        """
        for key, mine, option in (
            ("digest", self._digest, "data.path"),
            ("seed", self._seed, "run.seed"),
            ("shuffle", self._shuffle, "data.shuffle"),
        ):
            if state[key] != mine:
                raise DataError(
                    f"the checkpoint's prompt cursor belongs to another order of prompts: {key} is {mine!r} and was "
                    f"{state[key]!r}; resume with the {option} that the run began with"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self.items)))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self.items)).tolist()


def _jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their place, "file:line". Blank lines are skipped; line numbers count them."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line:
                raise DataError(f"{file} is not UTF-8 text: line {number} looks like UTF-16; save the file as UTF-8")
            try:
                row = json.loads(line.decode("utf-8-sig").rstrip(), object_pairs_hook=_without_duplicates)
            except json.JSONDecodeError as e:  # its own line number counts within the row
                raise DataError(f"{where}: not a JSON object: {e.msg} at character {e.pos + 1}") from e
            except UnicodeDecodeError as e:
                raise DataError(f"{where}: byte {e.start + 1} of the line is not UTF-8; save the file as UTF-8") from e
            except DataError as e:
                raise DataError(f"{where}: {e}") from e
            except ValueError as e:  # a number of thousands of digits
                raise DataError(f"{where}: not a JSON object: {e}") from e
            if not isinstance(row, dict):
                raise DataError(f"{where}: each line must be a JSON object, got {type(row).__name__}")
            yield where, row


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused if a key is there twice; json itself would keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the key {twice!r} is there twice; remove one of the two")
    return found


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their place, "file: row n"."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{file}: row {number}", row
                number += 1
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{file} is not a readable Parquet file: {e}") from e


def _text_of(row: dict[str, Any], where: str, encoder: Encoder, key: str, add_special_tokens: bool) -> tuple[str, bool]:
    """(the prompt's text, whether the tokenizer adds its special tokens to it)."""
    if key not in row:
        columns = ", ".join(sorted(map(str, row))) or "none"
        raise DataError(f"{where}: no column {key!r} (data.prompt_key); the columns are {columns}")
    value = row[key]
    if isinstance(value, str):
        text = value
        is_empty = not value.strip()
    elif (
        isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    ):
        try:
            text = encoder.render_chat(value)
        except DataError as e:
            raise DataError(f"{where}: {e}") from e
        except Exception as e:  # the edge to a tokenizer's own template code
            raise DataError(f"{where}: the tokenizer's chat template refuses the messages: {e}") from e
        add_special_tokens = False
        is_empty = not any(message["content"] for message in value)
    else:
        raise DataError(
            f"{where}: column {key!r} must be text or a non-empty list of messages with role and content, "
            f"got {type(value).__name__}"
        )
    if is_empty:
        raise DataError(f"{where}: the prompt is empty (column {key!r}); fill it, or remove the row")
    check_text(text, where)
    return text, add_special_tokens


def _digest(items: Sequence[Tokenized]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(np.asarray(item.token_ids, dtype=np.int64).tobytes())
        digest.update(b"|")
    return digest.hexdigest()
