"""Sources: rows of every form, from any row on, under the names that data.columns gives."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.orchestrator.data.sources import START, Position, Row, parse_hub_source, read_rows, renamed
from slipstream.rollout.errors import DataError

ROWS = [{"prompt": f"p{i}", "answer": {"value": i}} for i in range(11)]


@pytest.fixture(params=["jsonl", "parquet", "files", "saved"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Eleven rows in each of the forms that need no network."""
    path = tmp_path / f"rows.{request.param}"
    if request.param == "jsonl":
        path.write_text("\n".join(f"{json.dumps(row)}\n" for row in ROWS))  # a blank line after every row
    elif request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=4)
    elif request.param == "files":
        for number, rows in enumerate((ROWS[:5], ROWS[5:5], ROWS[5:9], ROWS[9:])):
            table = pa.Table.from_pylist(rows, schema=pa.Table.from_pylist(ROWS).schema)
            pq.write_table(table, tmp_path / f"train-0000{number}-of-00004.parquet", row_group_size=2)
        pq.write_table(pa.table({"prompt": ["held out"]}), tmp_path / "test-00000-of-00001.parquet")
        return str(tmp_path / "train-*.parquet")
    else:
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return str(path)


def test_every_form_gives_the_same_rows(source: str) -> None:
    assert [row.columns for row in read_rows(source)] == ROWS


def test_reading_goes_on_after_any_row(source: str) -> None:
    rows = list(read_rows(source))
    for number, row in enumerate(rows):
        assert row.after.num_rows == number + 1
        assert list(read_rows(source, row.after)) == rows[number + 1 :]


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_column_of_float32_has_the_decimals_that_were_written(is_saved: bool, tmp_path: Path) -> None:
    written = [0.1, None, -2.5e-7, 16777216.0, 3.0]
    table = pa.table({"answer": pa.array(written, pa.float32()), "wide": pa.array([1 / 3] * 5, pa.float64())})
    source = tmp_path / "rows.parquet"
    pq.write_table(table, source)
    if is_saved:
        import datasets

        source = tmp_path / "saved"
        datasets.Dataset(table).save_to_disk(str(source))
    assert [row.columns for row in read_rows(str(source))] == [{"answer": one, "wide": 1 / 3} for one in written]


@pytest.mark.parametrize(
    "column",
    [
        pa.Array.from_buffers(pa.string(), 1, pa.array([b"Z\xfcrich"]).buffers()),  # Latin-1
        pa.array([2**60], pa.timestamp("us")),  # after the year 9999
    ],
)
def test_a_value_that_python_cannot_hold_names_its_file(column: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": column}), path)
    with pytest.raises(DataError, match=rf"{path} is not a readable Parquet file: "):
        list(read_rows(str(path)))


def test_only_what_a_prompt_needs_is_read_of_a_parquet_file(tmp_path: Path) -> None:
    """Damage in the first row group does not matter to who begins in the second one."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=4, compression="none", use_dictionary=False)
    whole = list(read_rows(str(path)))
    metadata = pq.ParquetFile(path).metadata
    first = metadata.row_group(0).column(0)
    damaged = bytearray(path.read_bytes())
    damaged[first.data_page_offset : first.data_page_offset + 8] = b"\xff" * 8
    path.write_bytes(bytes(damaged))
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(read_rows(str(path)))
    assert list(read_rows(str(path), Position(4))) == whole[4:]


@pytest.mark.parametrize(
    ("columns", "path", "value"),
    [
        ({"question": 1}, "question", 1),
        ({"a": {"b": {"c": 2}}}, "a.b.c", 2),
        ({"a.b": 3, "a": {"b": 4}}, "a.b", 3),
        ({"problem": 5}, "question|problem", 5),
        ({"problem": 6, "question": None}, "question|problem", 6),
        ({"question": None}, "question|problem", None),
    ],
)
def test_a_column_is_found_by_its_path(columns: dict[str, Any], path: str, value: Any) -> None:
    assert renamed(Row("a.jsonl:1", columns, START), {"new": path}) == {**columns, "new": value}


@pytest.mark.parametrize("path", ["answer", "reward_model.truth", "prompt.role", "a|b"])
def test_a_column_that_is_missing_is_named_with_those_that_are_there(path: str) -> None:
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"style": "rule", "ground_truth": "4"}}
    with pytest.raises(DataError) as caught:
        renamed(Row("a.jsonl:7", row, START), {"answer": path})
    assert f"a.jsonl:7: no column {path!r} (data.columns.answer)" in str(caught.value)
    assert "prompt, reward_model.ground_truth, reward_model.style" in str(caught.value)


def test_folders_that_hold_no_dataset_are_refused_with_the_cure(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"splits has several splits; name the folder of one, such as .*splits/train"):
        next(read_rows(str(tmp_path / "splits")))
    assert next(read_rows(str(tmp_path / "splits" / "train"))).columns == ROWS[0]
    with pytest.raises(DataError, match=r"is a folder that Dataset\.save_to_disk has not written; give a \.jsonl"):
        next(read_rows(str(tmp_path)))
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=r"is a folder; name its files: data\.sources=\[.*/a\.jsonl\]"):
        next(read_rows(str(tmp_path)))
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    with pytest.raises(
        DataError, match=r"is a folder of Parquet files; name those of one split: '.*/data/train\*\.par"
    ):
        next(read_rows(str(tmp_path / "hub")))
    assert list(read_rows(str(tmp_path / "hub" / "data" / "train*.parquet")))[-1].after.num_rows == len(ROWS)
    with pytest.raises(DataError, match=r"data\.path=.*/test\*\.parquet: no file in .*/hub/data has such a name"):
        next(read_rows(str(tmp_path / "hub" / "data" / "test*.parquet")))
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "broken"))
    (tmp_path / "broken" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"broken is not a readable folder of Dataset\.save_to_disk"):
        next(read_rows(str(tmp_path / "broken")))


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf:openai/gsm8k:main:train", ("openai/gsm8k", "main", "train", None)),
        ("hf:squad:train", ("squad", None, "train", None)),
        ("hf:openai/gsm8k@e53f048:main:test", ("openai/gsm8k", "main", "test", "e53f048")),
    ],
)
def test_a_dataset_is_named_by_id_configuration_and_split(source: str, parts: tuple[str | None, ...]) -> None:
    assert parse_hub_source(source) == parts


@pytest.mark.parametrize("source", ["hf:", "hf:openai/gsm8k", "hf:a:b:c:d", "hf:a::train"])
def test_an_id_without_a_split_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="must be hf:REPO:SPLIT or hf:REPO:CONFIG:SPLIT"):
        next(read_rows(source))


READ = """import sys; from slipstream.orchestrator.data.sources import *
print([r.columns for r in read_rows(*sys.argv[1:])])"""


def read_elsewhere(source: str, cache: Path, *, code: str = READ, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a process with this cache of datasets, and no network, makes of a source."""
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", code, source], env=environment, capture_output=True, text=True, timeout=120
    )


UNREACHED = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize("variables", [{}, UNREACHED])
def test_a_dataset_by_id_comes_from_the_cache_without_the_hub(variables: dict[str, str], tmp_path: Path) -> None:
    """The cache is one that the library filled, under the name that it gives to a repository of the Hub."""
    import datasets

    folder, cache = tmp_path / "gsm8k", tmp_path / "cache"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.load_dataset(str(folder), split="train", cache_dir=str(cache))
    (cache / "gsm8k").rename(cache / "openai___gsm8k")
    done = read_elsewhere("hf:openai/gsm8k:default:train", cache, **variables)
    assert done.stdout.strip() == str(ROWS), done.stderr
    assert "Retrying" not in done.stderr


STREAM = """
import sys
from slipstream.orchestrator.data.sources import *
rows = list(read_rows(sys.argv[1], stream=True))
rest = list(read_rows(sys.argv[1], rows[49].after, stream=True))
print(len(rows), rest == rows[50:])
"""


def test_a_dataset_is_streamed_and_streaming_goes_on_after_any_row(tmp_path: Path) -> None:
    """Three files in a folder stand for a repository: the library reads both with the same code."""
    folder = tmp_path / "many"
    folder.mkdir()
    for part in range(3):
        rows = [{"prompt": f"{part} {number}"} for number in range(30)]
        (folder / f"train-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"hf:{folder}:default:train"
    done = read_elsewhere(source, tmp_path / "cache", code=STREAM, HF_HUB_OFFLINE="0")
    assert done.stdout.strip() == "90 True", done.stderr
    assert not list((tmp_path / "cache").rglob("*.arrow")), "nothing is stored"


@pytest.mark.parametrize(
    ("variables", "why"),
    [({}, "HF_HUB_OFFLINE is set"), (UNREACHED, r"http://127\.0\.0\.1:1 cannot be reached \(.*refused\)")],
)
def test_a_dataset_that_is_not_there_is_told_in_one_message(
    variables: dict[str, str], why: str, tmp_path: Path
) -> None:
    done = read_elsewhere("hf:openai/gsm8k:main:train", tmp_path, **variables)
    told = f"DataError: hf:openai/gsm8k:main:train: {why}, and the dataset is not in the cache \\({tmp_path}\\)"
    assert re.search(told, done.stderr), done.stderr
    assert "Retrying" not in done.stderr


def test_files_are_read_without_the_library(tmp_path: Path) -> None:
    """A module of the same name that cannot be imported stands for a machine without it."""
    (tmp_path / "datasets.py").write_text("raise ImportError('not installed')\n")
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n')
    without = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    assert read_elsewhere(str(path), tmp_path, **without).stdout.strip() == "[{'prompt': 'a'}]"
    assert "hf:a/b:train needs the package datasets, which is not installed; pip install datasets" in (
        read_elsewhere("hf:a/b:train", tmp_path, **without).stderr
    )
