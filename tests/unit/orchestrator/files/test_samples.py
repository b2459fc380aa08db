"""Locks: samples.jsonl says of each token what engine and trainer said, stays within its bytes, and is read whole
whatever state its index is in.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.orchestrator.figures.held_out import Evaluation
from slipstream.orchestrator.files import sample_index
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.sample_index import ENTRY, FAILED, TRUNCATED, read_index
from slipstream.orchestrator.files.samples import SampleLog, TrainedRollout, fitted, sample_row, shown_rollouts
from slipstream.rollout.types import Group, Prompt, Rollout, Turn


def group(prompt_id: int = 0, num_tokens: int = 3, reward: float | None = 1.0, siblings: int = 1) -> Group:
    rollout = Rollout(
        list(range(num_tokens)), [-0.5] * num_tokens, [3] * num_tokens, "text" * num_tokens, "length", failure=""
    )
    return Group(Prompt(prompt_id, (1,), "a prompt"), [rollout] * siblings, [reward] * siblings)


def rows_of(folder: RunFolder) -> list[dict]:
    return [json.loads(line) for line in folder.samples.read_bytes().splitlines()]


def written(folder: RunFolder, steps: range, *, after_step: int = 0, num_tokens: int = 3) -> None:
    log = SampleLog(folder, after_step=after_step, most=4, most_bytes=100_000)
    for step in steps:
        log.write(step, step, [group(step, num_tokens), group(step + 100, num_tokens, None)], [], {})
    log.close()


def test_first_responses_of_all_groups_come_before_the_second() -> None:
    groups = [group(siblings=2), group(siblings=1), group(siblings=3)]
    assert shown_rollouts(groups, 100) == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (2, 2)]
    assert shown_rollouts(groups, 4) == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert shown_rollouts([], 4) == shown_rollouts(groups, 0) == []


def test_a_row_has_the_figures_of_each_token_by_hand() -> None:
    """Tokens 0 and 2 count in the loss: their log-ratios are 0.5 and -0.25, token 1 has none."""
    rollout = Rollout([7, 8, 9], [-1.0, -2.0, -3.0], [4, 4, 5], "abc", "stop")
    trained = TrainedRollout(2, [0.5, None, 0.5], [-0.5, None, -3.25])
    row = sample_row(6, 6, "training", (0, 0), Group(Prompt(3, (1,), "p"), [rollout], [0.25]), trained)
    assert (row["token_ids"], row["versions"]) == ([7, 8, 9], [[4, 2], [5, 1]])
    assert (row["log_ratios"], row["rollout_logprobs"]) == ([0.5, None, -0.25], [-1.0, -2.0, -3.0])
    first, second = math.exp(0.5) - 1.5, math.exp(-0.25) - 0.75
    assert row["k3"] == pytest.approx((first + second) / 2, rel=1e-3)
    assert (row["k3_max"], row["mean_advantage"], row["staleness"]) == (pytest.approx(first, rel=1e-3), 0.5, 2)
    assert row["advantages"] == [0.5, None, 0.5]


def test_a_row_of_an_episode_has_its_turns_and_how_it_failed() -> None:
    turns = (Turn(None, [1, 2], 2, given="q", said="a"), Turn(0, [3], 1, reason="", given="r", said="b"))
    rollout = Rollout([5, 6, 7], [-1.0] * 3, [4, 4, 5], "ab", "stop", turns=turns, failure="raised")
    taught = replace(rollout, turns=(), teacher_logprobs=[-0.5, -0.25, -2.0])
    group = Group(Prompt(3, (1,), "q"), [rollout, taught], [None, 1.0], [{"right": 0.5}, {}])
    row = sample_row(2, 5, "train", (7, 0), group, None)
    assert row["turns"] == [
        {"parent": None, "reason": "start", "num_tokens": 2, "given": "q", "said": "a"},
        {"parent": 0, "reason": "", "num_tokens": 1, "given": "r", "said": "b"},
    ]
    assert (row["failure"], row["reward"], row["parts"], row["versions"]) == (
        "raised", None, {"right": 0.5}, [[4, 2], [5, 1]],
    )  # fmt: skip
    assert (row["step"], row["policy_version"], row["kind"], row["group"], row["sibling"], row["prompt_id"]) == (
        2, 5, "train", 7, 0, 3,
    )  # fmt: skip
    other = sample_row(2, 5, "eval", (7, 1), group, None)
    assert "turns" not in other and "failure" not in other and other["teacher_logprobs"] == [-0.5, -0.25, -2.0]


def test_numbers_that_json_does_not_have_are_null() -> None:
    rollout = Rollout([7, 8], [-math.inf, math.nan], [4, 4], "ab", "stop")
    trained = TrainedRollout(0, [1.0, 1.0], [math.nan, -1.0])
    row = sample_row(6, 6, "training", (0, 0), Group(Prompt(3, (1,), "p"), [rollout], [math.inf]), trained)
    line = fitted(row, 10_000)
    assert json.loads(line, parse_constant=pytest.fail)["rollout_logprobs"] == [None, None]


@given(st.integers(0, 4000), st.integers(0, 60_000), st.integers(0, 3), st.integers(3000, 60_000))
def test_a_row_is_never_longer_than_its_share(num_tokens: int, num_chars: int, num_turns: int, most: int) -> None:
    turns = tuple(
        Turn(i - 1 if i else None, [1], num_tokens // num_turns, given="\x00" * num_chars) for i in range(num_turns)
    )
    rollout = Rollout([9] * num_tokens, [-1.0] * num_tokens, [0] * num_tokens, "<b>" * num_chars, "stop", turns=turns)
    row = sample_row(1, 1, "held-out", (0, 0), Group(Prompt(0, (1,), "\x01" * num_chars), [rollout], [1.0]), None)
    line = fitted(row, most)
    if line is None:  # 200 characters of each text, six bytes each, are always kept
        assert most < 3000 + 6 * 200 * 3 * num_turns
        return
    assert len(line) <= most
    found = json.loads(line)
    first, end = found.get("cut", [0, 0])
    assert found["num_tokens"] == num_tokens == len(found["token_ids"]) + end - first
    assert found["response"].startswith("<b>" * min(num_chars, 10))


def test_a_step_takes_its_bytes_at_most(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = SampleLog(folder, after_step=0, most=3, most_bytes=8000)
    log.write(1, 1, [group(num_tokens=4000)] * 9, [Evaluation(1, 1, {"": [group()] * 9})], {})
    log.close()
    assert 4000 < folder.samples.stat().st_size <= 8000
    assert [row["kind"] for row in rows_of(folder)] == ["training"] * 3 + ["held-out"] * 3
    assert [bool(row.get("cut")) for row in rows_of(folder)] == [True] * 3 + [False] * 3


def test_the_index_has_what_rows_are_sorted_by(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = SampleLog(folder, after_step=0, most=9, most_bytes=100_000)
    trained = {(1, 0): TrainedRollout(2, [0.5] * 3, [-1.5] * 3)}
    log.write(4, 4, [group(7, reward=None), group(8, reward=0.5)], [Evaluation(3, 3, {"hard": [group(9)]})], trained)
    log.close()
    entries = np.fromfile(folder.samples_index, ENTRY)
    assert entries["prompt_id"].tolist() == [7, 8, 9] and entries["kind"].tolist() == [0, 0, 1]
    assert entries["flags"].tolist() == [TRUNCATED | FAILED, TRUNCATED, TRUNCATED]
    assert entries["k3"][1] == pytest.approx(math.exp(-1) - 1 + 1, rel=1e-3)
    assert np.isnan(entries["k3"][[0, 2]]).all() and np.isnan(entries["reward"][0])
    assert (entries["staleness"][1], entries["advantage"][1], entries["num_tokens"][1]) == (2, 0.5, 3)
    for entry, row in zip(entries, rows_of(folder), strict=True):
        line = folder.samples.read_bytes()[entry["offset"] : entry["offset"] + entry["length"]]
        assert json.loads(line) == row


def broken(folder: RunFolder, how: str) -> None:
    rows, index = folder.samples.read_bytes(), folder.samples_index.read_bytes()
    if how == "index is missing":
        folder.samples_index.unlink()
    elif how == "index is behind":
        folder.samples_index.write_bytes(index[: 2 * ENTRY.itemsize])
    elif how == "index ends inside an entry":
        folder.samples_index.write_bytes(index[:-5])
    elif how == "index is of another file":
        folder.samples_index.write_bytes(b"\x07" * len(index))
    elif how == "rows were replaced":
        folder.samples.write_bytes(b'{"step": 1}\n' + rows)
    elif how == "last row is half-written":
        folder.samples.write_bytes(rows[:-9])
    elif how == "something else is between rows":
        lines = rows.splitlines(keepends=True)
        folder.samples.write_bytes(b"".join([lines[0], b"\xff\x00 no json\n", *lines[1:]]))


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ("nothing", [1, 1, 2, 2, 3, 3]),
        ("index is missing", [1, 1, 2, 2, 3, 3]),
        ("index is behind", [1, 1, 2, 2, 3, 3]),
        ("index ends inside an entry", [1, 1, 2, 2, 3, 3]),
        ("index is of another file", [1, 1, 2, 2, 3, 3]),
        ("rows were replaced", [1, 1, 1, 2, 2, 3, 3]),
        ("last row is half-written", [1, 1, 2, 2, 3]),
        ("something else is between rows", [1, 1, 2, 2, 3, 3]),
    ],
)
def test_every_whole_row_is_found_whatever_became_of_the_files(tmp_path: Path, how: str, steps: list[int]) -> None:
    folder = RunFolder(tmp_path)
    written(folder, range(1, 4))
    broken(folder, how)
    entries = read_index(folder.samples, folder.samples_index)
    assert entries["step"].tolist() == steps
    content = folder.samples.read_bytes()
    for entry in entries:
        assert json.loads(content[entry["offset"] : entry["offset"] + entry["length"]])["step"] == entry["step"]
    written(folder, range(3, 5), after_step=2)  # the run goes on from a checkpoint of step 2
    assert [row["step"] for row in map(json.loads, lines_that_are_rows(folder))] == [
        *steps[: steps.index(3)],
        3,
        3,
        4,
        4,
    ]
    assert len(np.fromfile(folder.samples_index, ENTRY)) == len(read_index(folder.samples, folder.samples_index))


@pytest.mark.parametrize(
    ("change", "num_believed"),
    [
        (lambda entries: entries, 6),
        (lambda entries: entries[:2], 2),
        (lambda entries: entries[:0], 0),
        (lambda entries: shifted(entries, 3, "length", -entries["length"][3].astype(int)), 3),
        (lambda entries: shifted(entries, 2, "offset", -1), 2),
        (lambda entries: shifted(entries, 5, "length", 1), 5),  # beyond the end of the file
        (lambda entries: shifted(entries, 0, "step", 7), 0),
        (lambda entries: shifted(entries, 5, "step", 7), 0),
    ],
)
def test_rows_that_the_index_has_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, num_believed: int
) -> None:
    folder, begun = RunFolder(tmp_path), []
    written(folder, range(1, 4))
    entries = read_index(folder.samples, folder.samples_index)
    starts = [*entries["offset"].tolist(), folder.samples.stat().st_size]
    scan = sample_index.scan
    monkeypatch.setattr(sample_index, "scan", lambda file, start: begun.append(start) or scan(file, start))
    assert sample_index.extended(folder.samples, change(entries.copy())).tobytes() == entries.tobytes()
    assert begun == [starts[num_believed]]


def shifted(entries: np.ndarray, row: int, field: str, by: int) -> np.ndarray:
    entries[field][row] = int(entries[field][row]) + by
    return entries


def test_an_entry_holds_what_a_row_says_as_far_as_it_fits(tmp_path: Path) -> None:
    row = {"step": 1 << 40, "prompt_id": 1 << 40, "num_tokens": -3, "staleness": "2", "turns": [{}] * 70_000}
    (entry,) = sample_index.entry_of(row, 5, 9)
    names = ("offset", "length", "step", "prompt_id", "num_tokens", "staleness", "num_turns", "kind", "flags")
    assert [int(entry[name]) for name in names] == [5, 9, (1 << 32) - 1, (1 << 31) - 1, 0, 0, (1 << 16) - 1, 0, FAILED]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"step": 3}\n[1]\n{"step": "4"}\n{}\nno row\n{"step": 5}\n{"step": 6}')
    with file.open("rb") as rows:
        found = list(sample_index.scan(rows, 0))
    assert [(int(one["step"][0]), int(one["offset"][0]), int(one["length"][0])) for one in found] == [
        (3, 0, 12), (5, 12 + 4 + 14 + 3 + 7, 12)
    ]  # fmt: skip


def lines_that_are_rows(folder: RunFolder) -> list[bytes]:
    return [line for line in folder.samples.read_bytes().splitlines() if line.startswith(b"{")]
