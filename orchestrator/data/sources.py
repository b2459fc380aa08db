"""Rows of a source: a file, a folder that `datasets` saved, or a dataset of the Hugging Face Hub.

    FILE.jsonl   FILE.parquet   pkg://NAME            relative paths start at the working directory
    FOLDER/train-*.parquet                            files of one split, by name one after the other
    FOLDER                                            written by Dataset.save_to_disk
    hf:REPO[@REVISION]:SPLIT                          by id, from the Hub or its local cache
    hf:REPO[@REVISION]:CONFIG:SPLIT                   such as hf:openai/gsm8k:main:train

Owns: these forms, reading them from any row on, and data.columns, which gives columns other names. Does not own what a
row must hold (prompts.py, inputs/rows/conversations.py).
Invariant: reading from `row.after` goes on with the row that follows `row`. A reader holds a few rows at a time,
however many the source has. `datasets` is imported for the last three forms alone.
"""

import codecs
import functools
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from slipstream import conf
from slipstream.conf.json_files import JsonMapping, JsonObject, is_object, object_or_empty
from slipstream.rollout.errors import DataError

PACKAGED = "pkg://"
HUB = "hf:"
FORMS = (
    "a .jsonl or .parquet file, a folder of Dataset.save_to_disk, or hf:REPO:SPLIT or hf:REPO:CONFIG:SPLIT "
    "(hf:openai/gsm8k:main:train)"
)
_BY_PANDAS = (
    "; write it anew: python -c \"import pandas; pandas.{read}('{path}', dtype=str).to_parquet('{stem}.parquet')\""
)
OTHER_ENDINGS = {
    ".json": "; one object a line is JSONL: of a list, jq -c '.[]' {path} > {stem}.jsonl",
    ".gz": "; unpack it: gunzip {path}",
    ".zst": "; unpack it: zstd -d {path}",
    ".csv": _BY_PANDAS.replace("{read}", "read_csv"),
    ".tsv": _BY_PANDAS.replace("{read}", "read_table"),
}
"""What makes a source of a file in another form."""
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")
"""How files of gzip, zstd and zip begin."""
_ROWS_AT_ONCE = 1024
_HUB_TIMEOUT_S = 5.0
_ASKED_AND_ANSWERED = (
    ("question", "answer"),
    ("problem", "solution"),
    ("query", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
)
"""Names of other data sets for what is asked and what answers it (GSM8K, MATH, MetaMath, Alpaca, Dolly)."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two rows. Example: Position(3, 181, 4): after three rows, 181 bytes and four lines."""

    num_rows: int = 0
    num_bytes: int = 0
    """JSONL alone."""
    num_lines: int = 0
    """JSONL alone; blank lines count."""


START = Position()


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Example: Row("a.jsonl:4", {"prompt": "2 + 2 =", "answer": "4"}, Position(3, 181, 4))."""

    where: str
    """Its place, for messages: "FILE:LINE" (JSONL, from 1) or "SOURCE: row N" (from 0)."""
    columns: JsonObject
    after: Position


def read_rows(
    source: str, start: Position = START, *, stream: bool = False, option: str = "data.path"
) -> Iterator[Row]:
    """Rows of a source in its own order, from `start` on. Raises DataError: the source is missing, malformed or of
    another kind. Names the file and, if it is one row, its place.

    Args:
        stream: Read a dataset of the Hub row by row, over the network, instead of downloading it first.
        option: Which option names the source, for the message where there is none.
    """
    if source.startswith(HUB):
        return _hub_rows(source, start, stream=stream)
    path = resolve_path(source)
    if "://" in source and not path.is_absolute():
        raise DataError(f"{option}={source} is an address; download it first, or give {FORMS}")
    if (path / "state.json").is_file():
        return _saved_rows(path, start)
    return _file_rows(path, start, option)


def resolve_path(path: str) -> Path:
    """`pkg://NAME` is conf/data/NAME; anything else starts at the working directory."""
    if path.startswith(PACKAGED):
        return Path(conf.__file__).parent / "data" / path.removeprefix(PACKAGED)
    return Path(path)


def renamed(row: Row, columns: Mapping[str, str]) -> JsonObject:
    """The row's columns, and those that data.columns adds to them: name -> where its value is.

    Example: {"answer": "reward_model.ground_truth"} takes a field of a struct; {"prompt": "question|problem"} takes the
    first of the two that the row has and that is not null: Parquet gives every row all columns. Raises: DataError.
    """
    found = dict(row.columns)
    for name, text in columns.items():
        values = [value for path in text.split("|") for value in _at(row.columns, path)]
        if not values:
            raise DataError(
                f"{row.where}: no column {text!r} (data.columns.{name}); the columns are {listed(row.columns)}"
            )
        found[name] = next((value for value in values if value is not None), None)
    return found


def listed(columns: JsonMapping) -> str:
    """Names of columns for a message, those of structs with their fields."""
    names = [f"{name}.{field}" for name, value in columns.items() for field in (object_or_empty(value) or ("",))]
    return ", ".join(sorted(name.removesuffix(".") for name in names)) or "none"


def other_names(columns: JsonMapping, *, with_answers: bool) -> str:
    """What to set for a row whose columns have other systems' names, to end a message with; "" for names of nobody.
    `with_answers`: the row must hold an answer to learn as well (SFT)."""
    if "conversations" in columns:
        if not with_answers:
            return (
                "; these look like ShareGPT's rows, whose answers algorithm=sft learns; a prompt ends before its answer"
            )
        return (
            "; these look like ShareGPT's rows: docs/data.md has the lines that write 'messages', or, if they "
            "hold 'role' and 'content' already, set data.columns.messages=conversations"
        )
    for column, algorithm in (("messages", "sft"), ("chosen", "dpo")):
        if column in columns and not with_answers:
            return f"; algorithm={algorithm} learns rows with {column!r}"
    for asked, answered in _ASKED_AND_ANSWERED:
        if asked in columns and (answered in columns or not with_answers) and not columns.get("input"):
            answer = f" data.columns.response={answered}" if with_answers else ""
            return f"; did you mean data.prompt_key={asked}{answer}?"
    return ""


def _at(columns: JsonMapping, path: str) -> list[Any]:
    """[the value at a dotted path], or [] when there is none. A column whose own name has dots goes first."""
    if path in columns:
        return [columns[path]]
    value: Any = columns
    for part in path.split("."):
        if not is_object(value) or part not in value:
            return []
        value = value[part]
    return [value]


def _file_rows(path: Path, start: Position, option: str) -> Iterator[Row]:
    if not path.exists() and "*" in path.name and path.suffix == ".parquet":
        if not (files := sorted(path.parent.glob(path.name))):
            raise DataError(f"{option}={path}: no file in {path.parent.absolute()} has such a name")
        return _rows_of_files(files, start)
    if not path.is_file():
        what = "does not exist" if path.is_absolute() else f"does not exist in {Path.cwd()}"
        if (path / "dataset_dict.json").is_file():
            what = f"has several splits; name the folder of one, such as {path}/train"
        elif path.is_dir() and (files := sorted(path.rglob("*.parquet"))):
            split = files[0].with_name(f"{files[0].name.partition('-')[0].removesuffix('.parquet')}*.parquet")
            raise DataError(f"{option}={path} is a folder of Parquet files; name those of one split: '{split}'")
        elif path.is_dir() and (files := sorted(path.glob("*.jsonl"))):
            raise DataError(f"{option}={path} is a folder; name its files: data.sources=[{','.join(map(str, files))}]")
        elif path.is_dir():
            what = "is a folder that Dataset.save_to_disk has not written"
        elif path.exists():
            what = "is no file that can be read more than once, as a run does"
        raise DataError(f"{option}={path} {what}; give {FORMS}")
    readers: dict[str, Callable[[Path, Position], Iterator[Row]]] = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        cure = OTHER_ENDINGS.get(path.suffix, "").format(path=path, stem=path.with_suffix(""))
        raise DataError(f"{path} must end in .jsonl or .parquet, got {path.suffix or 'no ending'!r}{cure}")
    return readers[path.suffix](path, start)


def _jsonl_rows(file: Path, start: Position) -> Iterator[Row]:
    """Blank lines are skipped; line numbers count them."""
    num_rows, num_bytes, num_lines = start.num_rows, start.num_bytes, start.num_lines
    with file.open("rb") as lines:
        lines.seek(num_bytes)
        for line in lines:
            num_bytes += len(line)
            num_lines += 1
            if not line.strip():
                continue
            num_rows += 1
            columns = _parse_line(line, file, num_lines)
            yield Row(f"{file}:{num_lines}", columns, Position(num_rows, num_bytes, num_lines))


def _parse_line(line: bytes, file: Path, number: int) -> JsonObject:
    where = f"{file}:{number}"
    if line.startswith(_PACKED):
        raise DataError(f"{file} is compressed; unpack it")
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line:
        raise DataError(f"{file} is not UTF-8 text: line {number} looks like UTF-16; save the file as UTF-8")
    try:
        row: Any = json.loads(line.decode("utf-8-sig").rstrip(), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as e:  # its own line number counts within the row
        told = f"{where}: not a JSON object: {e.msg.removesuffix(' at')} at character {e.pos + 1}"
        is_of_many_lines = line.strip() in (b"{", b"[")
        raise DataError(f"{told}; a row is one line: jq -c . {file}" if is_of_many_lines else told) from e
    except UnicodeDecodeError as e:
        raise DataError(f"{where}: byte {e.start + 1} of the line is not UTF-8; save the file as UTF-8") from e
    except DataError as e:
        raise DataError(f"{where}: {e}") from e
    except (ValueError, RecursionError) as e:  # a number of thousands of digits; lists in lists in lists
        raise DataError(f"{where}: not a JSON object: {e}") from e
    if not is_object(row):
        raise DataError(f"{where}: each line must be a JSON object, got {type(row).__name__}")
    return row


def _without_duplicates(pairs: list[tuple[str, Any]]) -> JsonObject:
    """A JSON object, refused if a key is there twice; json itself would keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the key {twice!r} is there twice; remove one of the two")
    return found


def _rows_of_files(files: Sequence[Path], start: Position) -> Iterator[Row]:
    """Rows of Parquet files as of one; positions count those of all."""
    before = 0
    for file in files:
        with _reading(file) as parquet:
            num_rows = int(parquet.read_metadata(file).num_rows)
        if start.num_rows < before + num_rows:
            for row in _parquet_rows(file, Position(max(start.num_rows - before, 0))):
                yield replace(row, after=Position(before + row.after.num_rows))
        before += num_rows


@contextmanager
def _reading(file: Path) -> Generator[Any]:
    """pyarrow.parquet, whose errors name the file."""
    arrow: Any = import_module("pyarrow")
    try:
        yield import_module("pyarrow.parquet")
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as e:  # text that is not UTF-8; a date of year 0
        raise DataError(f"{file} is not a readable Parquet file: {e}") from e


def _parquet_rows(file: Path, start: Position) -> Iterator[Row]:
    """Row groups before the one that holds `start` are not read."""
    with _reading(file) as parquet:
        table = parquet.ParquetFile(file)
        sizes = [int(table.metadata.row_group(group).num_rows) for group in range(table.num_row_groups)]
        number = first = 0
        while first < len(sizes) and number + sizes[first] <= start.num_rows:
            number += sizes[first]
            first += 1
        shortened = _shortening([field.name for field in table.schema_arrow if str(field.type) == "float"])
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=list(range(first, len(sizes)))):
            begin = min(max(start.num_rows - number, 0), batch.num_rows)
            number += begin
            for columns in batch.slice(begin).to_pylist():
                yield Row(f"{file}: row {number}", shortened(columns), Position(number + 1))
                number += 1


def _shortening(names: Sequence[str]) -> Callable[[JsonObject], JsonObject]:
    """What gives columns of float32 the shortest decimal that stands for their number: 0.1, and not, as a wider float
    has it, 0.10000000149011612, which would be the text of an answer."""

    def shortened(columns: JsonObject) -> JsonObject:
        return columns | {name: float(str(np.float32(it))) for name in names if (it := columns[name]) is not None}

    return shortened if names else dict


def _saved_rows(folder: Path, start: Position) -> Iterator[Row]:
    """Rows of Dataset.save_to_disk; its files are mapped, not read."""
    datasets = _datasets(str(folder))
    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError(f"{folder} is not a readable folder of Dataset.save_to_disk: {_one_line(e)}") from e
    return _dataset_rows(saved, str(folder), start)


def _hub_rows(source: str, start: Position, *, stream: bool) -> Iterator[Row]:
    repo, config, split, revision = parse_hub_source(source)
    datasets = _datasets(source)
    why_alone = "HF_HUB_OFFLINE is set" if datasets.config.HF_HUB_OFFLINE else ""
    if not why_alone and not Path(repo).is_dir() and (why_alone := _why_unreached(datasets.config.HF_ENDPOINT)):
        datasets.config.HF_HUB_OFFLINE = True  # it would ask six times, for half a minute, before it looks there
    try:
        # Offline there is nothing to stream from but the cache, which is on this machine as a whole.
        rows = datasets.load_dataset(repo, config, split=split, revision=revision, streaming=stream and not why_alone)
    except ConnectionError as e:
        raise DataError(
            f"{source}: {why_alone or _one_line(e)}, and the dataset is not in the cache "
            f"({datasets.config.HF_DATASETS_CACHE}). Load it once where the Hub can be reached, or give a file or a "
            "folder of Dataset.save_to_disk"
        ) from e
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as e:
        raise DataError(f"{source} cannot be loaded: {_one_line(e)}") from e
    return _dataset_rows(rows, source, start)


@functools.cache
def _why_unreached(endpoint: str) -> str:
    """Why no server answers there, or "". Any answer will do: what it means is the library's to say."""
    try:
        httpx.head(endpoint, timeout=_HUB_TIMEOUT_S)
    except httpx.TransportError as e:
        return f"{endpoint} cannot be reached ({_one_line(e)})"
    return ""


def parse_hub_source(source: str) -> tuple[str, str | None, str, str | None]:
    """(repository, config or None, split, revision or None) of `hf:REPO[@REVISION][:CONFIG]:SPLIT`."""
    parts = source.removeprefix(HUB).split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise DataError(f"{source!r} must be hf:REPO:SPLIT or hf:REPO:CONFIG:SPLIT, as in hf:openai/gsm8k:main:train")
    repo, _, revision = parts[0].partition("@")
    return repo, parts[1] if len(parts) == 3 else None, parts[-1], revision or None


def _dataset_rows(rows: Any, name: str, start: Position) -> Iterator[Row]:
    if hasattr(rows, "__len__") and len(rows) <= start.num_rows:  # one that is streamed has no length
        return
    kinds: Mapping[str, Any] = rows.features or {}  # one that is streamed may not know them
    shortened = _shortening([column for column, kind in kinds.items() if getattr(kind, "dtype", "") == "float32"])
    try:
        for number, columns in enumerate(rows.skip(start.num_rows), start=start.num_rows):
            yield Row(f"{name}: row {number}", shortened(columns), Position(number + 1))
    except (OSError, ValueError) as e:  # of a stream: the network; of a file: its end is missing
        raise DataError(f"{name} cannot be read: {_one_line(e)}") from e


def _datasets(source: str) -> Any:
    """The library, which a machine that reads JSONL and Parquet can do without."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        return import_module("datasets")
    except ImportError as e:
        raise DataError(
            f"{source} needs the package datasets, which is not installed; pip install datasets, or give a .jsonl or "
            ".parquet file"
        ) from e


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
