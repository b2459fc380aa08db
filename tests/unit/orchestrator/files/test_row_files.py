"""Locks: long files of rows are read and cut at the right row, from either end, whatever a crash left behind them."""

import json
from pathlib import Path

import pytest

from slipstream.orchestrator.files.row_files import cut_rows, last_rows, read_figures, read_rows

NUM_ROWS = 3000
"""Of a kilobyte or so: several blocks."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for step in range(NUM_ROWS):
            file.write(json.dumps({"step": step, "loss": None, "reward": step / 8, "text": "x" * (step % 2000)}) + "\n")
        file.write('{"step": 9999, "text": "a crash')
    return path


def test_rows_are_read_whole_or_in_part(rows: Path) -> None:
    assert [row["step"] for row in read_rows(rows)] == list(range(NUM_ROWS))
    assert read_rows(rows)[3] == {"step": 3, "loss": None, "reward": 0.375, "text": "xxx"}
    assert read_rows(rows, ("loss", "reward", "no such"))[3] == {"loss": None, "reward": 0.375}


@pytest.mark.parametrize("most", [1, 20, 2999, 3000, 5000])
def test_the_newest_rows_are_read_from_the_end(rows: Path, most: int) -> None:
    assert last_rows(rows, most) == read_figures(rows)[-most:]


@pytest.mark.parametrize("step", [NUM_ROWS, NUM_ROWS - 1, NUM_ROWS - 2, 1500, 0, -1])
def test_rows_of_later_steps_are_cut_off(rows: Path, step: int) -> None:
    whole = rows.read_bytes().splitlines(keepends=True)[:-1]
    removed = cut_rows(rows, after_step=step, names=("reward",))
    assert rows.read_bytes() == b"".join(whole[: step + 1]), "to the byte"
    assert removed == [{"step": one, "reward": one / 8} for one in range(step + 1, NUM_ROWS)]
    assert [one.name for one in rows.parent.iterdir()] == ["rows.jsonl"]


def test_a_file_that_is_cut_is_another_one_for_those_who_follow_it(rows: Path) -> None:
    inode = rows.stat().st_ino
    cut_rows(rows, after_step=NUM_ROWS)
    assert rows.stat().st_ino != inode, "the half row has gone"
    inode = rows.stat().st_ino
    assert (cut_rows(rows, after_step=NUM_ROWS), rows.stat().st_ino) == ([], inode), "nothing to cut"


def test_lines_that_are_no_rows_count_as_not_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n[2]\n{"step": 2}\n\xff\n')
    assert read_rows(path) == read_rows(path, ["step"]) == last_rows(path, 2) == [{"step": 1}, {"step": 2}]
    assert cut_rows(path, after_step=1) == [{"step": 2}]
    assert path.read_bytes() == b'{"step": 1}\n'


def test_in_figures_by_step_a_row_without_a_step_is_none_and_a_text_is_no_figure(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": "1", "loss": 1.0}\n{"step": 1, "loss": "2", "lr": 3}\n{"loss": 4.0}\n{"step": null}\n')
    assert read_figures(path) == last_rows(path, 9) == [{"step": 1, "loss": None, "lr": 3}]
    assert read_figures(path, ["loss"]) == cut_rows(path, after_step=0, names=["loss"]) == [{"step": 1, "loss": None}]
    assert path.read_bytes() == b""


def test_half_of_a_surrogate_pair_costs_a_character_and_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"step": 1, "text": "a\ud800b", "more": ["\U0001f600", "\\ud800"]}) + "\n")
    read = {"step": 1, "text": "a\ufffdb", "more": ["\U0001f600", "\\ud800"]}
    assert read_rows(path) == [read]
    assert read_rows(path, ["step"]) == cut_rows(path, after_step=0) == [{"step": 1}]


@pytest.mark.parametrize("content", [None, "", "{"])
def test_there_may_be_no_row(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    assert read_rows(path) == last_rows(path, 5) == cut_rows(path, after_step=3) == []
    assert path.exists() is (content is not None)
