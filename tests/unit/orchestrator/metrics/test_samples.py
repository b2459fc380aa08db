"""Locks: samples.jsonl says of each token what engine and trainer said, stays within its bytes, and its rows are listed
whatever became of it.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.metrics.held_out import Evaluation
from slipstream.orchestrator.metrics.samples import SampleLog, TrainedRollout, fitted, sample_row, shown_rollouts
from slipstream.orchestrator.view.samples import ENTRY, FAILED, TRUNCATED, extended
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


def test_a_step_whose_rows_are_all_too_long_takes_its_bytes_at_most(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = SampleLog(folder, after_step=0, most=9, most_bytes=30_000)
    log.write(1, 1, [group(num_tokens=4000)] * 9, [], {})
    log.close()
    assert len(rows_of(folder)) == 9 and folder.samples.stat().st_size <= 30_000


def test_a_text_that_lost_its_middle_says_how_much_of_it_is_left_out() -> None:
    """However often it was halved until the row fitted; the row itself keeps its texts."""
    turns = (Turn(None, [1], 2, given="g" * 9000, said="s" * 7000), Turn(0, [1], 1, given="h" * 5000, said="t" * 3000))
    rollout = Rollout([5, 6, 7], [-1.0] * 3, [4] * 3, "r" * 8000, "stop", turns=turns)
    row = sample_row(1, 1, "training", (0, 0), Group(Prompt(3, (1,), "p" * 6000), [rollout], [1.0]), None)
    whole, short = json.dumps(row), json.loads(fitted(row, 5000))
    assert json.dumps(row) == whole
    texts = [(one[name], found[name]) for one, found in zip(row["turns"], short["turns"]) for name in ("given", "said")]
    for text, found in [*texts, *((row[name], short[name]) for name in ("prompt", "response"))]:
        start, num_left_out, end = re.fullmatch(r"(\w+)\n\[\.\.\. (\d+) characters .*\]\n(\w+)", found).groups()
        assert len(start) + int(num_left_out) + len(end) == len(text)


NOTHING = np.zeros(0, ENTRY)


def test_the_index_has_what_rows_are_sorted_by(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = SampleLog(folder, after_step=0, most=9, most_bytes=100_000)
    trained = {(1, 0): TrainedRollout(2, [0.5] * 3, [-1.5] * 3)}
    log.write(4, 4, [group(7, reward=None), group(8, reward=0.5)], [Evaluation(3, 3, {"hard": [group(9)]})], trained)
    log.close()
    entries = extended(folder.samples, NOTHING)
    assert entries["prompt_id"].tolist() == [7, 8, 9] and entries["kind"].tolist() == [0, 0, 1]
    assert entries["flags"].tolist() == [TRUNCATED | FAILED, TRUNCATED, TRUNCATED]
    assert entries["k3"][1] == pytest.approx(math.exp(-1) - 1 + 1, rel=1e-3)
    assert np.isnan(entries["k3"][[0, 2]]).all() and np.isnan(entries["reward"][0])
    assert (entries["staleness"][1], entries["advantage"][1], entries["num_tokens"][1]) == (2, 0.5, 3)
    for entry, row in zip(entries, rows_of(folder), strict=True):
        line = folder.samples.read_bytes()[entry["offset"] : entry["offset"] + entry["length"]]
        assert json.loads(line) == row


def test_every_whole_row_is_found_and_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert len(extended(folder.samples, NOTHING)) == 0
    written(folder, range(1, 4))
    whole = folder.samples.read_bytes()
    folder.samples.write_bytes(whole[:-9])  # killed while it wrote
    assert extended(folder.samples, NOTHING)["step"].tolist() == [1, 1, 2, 2, 3]
    written(folder, range(3, 5), after_step=2)  # the run goes on from a checkpoint of step 2
    entries, content = extended(folder.samples, NOTHING), folder.samples.read_bytes()
    assert entries["step"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4] and content.startswith(whole)
    for entry in entries:
        assert json.loads(content[entry["offset"] : entry["offset"] + entry["length"]])["step"] == entry["step"]
    written(folder, range(0), after_step=0)
    assert folder.samples.read_bytes() == b""


def test_rows_that_are_known_are_read_again_only_where_the_file_is_another_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    written(folder, range(1, 4))
    entries = extended(folder.samples, NOTHING)
    known = entries.copy()
    known["reward"] = 7.0
    written(folder, range(4, 5), after_step=3)
    assert extended(folder.samples, known)["reward"].tolist()[:7] == [7.0] * 6 + [1.0]
    written(folder, range(2, 3), after_step=1, num_tokens=5)
    assert extended(folder.samples, known)["step"].tolist() == [1, 1, 2, 2]
    assert extended(folder.samples, known)["reward"][0] == 1.0


def test_a_line_that_is_no_row_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"step": 3}\n[1]\n{"step": "4"}\n{}\nno row\n\xff\n{"step": 5, "turns": [{}, {}]}\n{"step": 6}')
    found = extended(file, NOTHING)
    assert [(one["step"], one["offset"], one["length"], one["num_turns"]) for one in found] == [
        (3, 0, 12, 0), (5, 12 + 4 + 14 + 3 + 7 + 2, 31, 2)
    ]  # fmt: skip
