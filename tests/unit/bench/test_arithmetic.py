"""The arithmetic task: its rows are what they claim, the presets accept them, the reward sees the last result alone."""

import dataclasses
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save_file

from bench.make_arithmetic import LARGE, SMALL, Task, expression, make_rows, share_right, working, write
from slipstream.conf.architecture.families import read_config
from slipstream.conf.load import load_run_config
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.rewards.function import load_reward

STEP = re.compile(r"(\d+)([+-]\d+)=(\d+);")
FEW = {"num_train": 300, "num_heldout": 60}


@st.composite
def sums(draw: st.DrawFn) -> tuple[Task, list[int], random.Random]:
    """A task, one of its expressions, and what draws mistakes."""
    fewest = draw(st.integers(1, 6))
    task = Task(fewest, fewest + draw(st.integers(0, 4)), draw(st.integers(2, 99)), draw(st.floats(0, 1)), 1, 1)
    rng = random.Random(draw(st.integers()))
    return task, expression(task, rng), rng


@given(sums())
def test_a_working_goes_through_every_operand_and_every_result_stays_in_range(
    made: tuple[Task, list[int], random.Random],
) -> None:
    task, numbers, rng = made
    assert task.fewest_steps <= len(numbers) - 1 <= task.most_steps
    said = working(numbers, task.wrong_share, task.largest, rng)
    steps = STEP.findall(said)
    assert said == "".join(f"{a}{b}={c};" for a, b, c in steps) + f"#{steps[-1][2]}"
    assert [int(b) for _, b, _ in steps] == numbers[1:]
    assert [int(a) for a, _, _ in steps] == [numbers[0], *(int(c) for *_, c in steps[:-1])]
    for *_, c in steps:
        assert 0 <= int(c) <= task.largest


@given(sums())
def test_without_wrong_steps_a_working_ends_with_the_answer(made: tuple[Task, list[int], random.Random]) -> None:
    task, numbers, rng = made
    said = working(numbers, 0.0, task.largest, rng)
    assert said.endswith(f";#{sum(numbers)}")
    assert all(eval(a + b) == int(c) for a, b, c in STEP.findall(said))


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_answers_are_right_and_no_sum_is_there_twice(size: Task) -> None:
    train, heldout = make_rows(dataclasses.replace(size, **FEW))
    assert (len(train), len(heldout)) == (300, 60)
    assert len({row["prompt"] for row in train + heldout}) == 360
    for row in train + heldout:
        assert str(eval(row["prompt"].removesuffix("="))) == row["answer"]
    assert (train, heldout) == make_rows(dataclasses.replace(size, **FEW))
    assert (train, heldout) != make_rows(dataclasses.replace(size, **FEW, seed=size.seed + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fewest_steps": 6}, "fewest <= most, got 6 and 5"),
        ({"fewest_steps": 0}, "got 0 and 5"),
        ({"largest": 0}, "--largest must be at least 1, got 0"),
        ({"wrong_share": 1.5}, "--wrong-share must be from 0 to 1, got 1.5"),
        ({"num_heldout": 0}, "--num-heldout must be at least 1"),
        ({"largest": 1, "most_steps": 3, "num_train": 100}, "only 2 different sums of"),  # 0+1-1+1 and 1-1+1-1
    ],
)
def test_a_task_that_cannot_be_made_is_refused_in_words(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rows(dataclasses.replace(SMALL, **change))


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_demonstrations_leave_room_and_something_to_find(size: Task) -> None:
    """A model that imitates them is to start below 0.3, and above what a group of 16 never sees."""
    train, _ = make_rows(dataclasses.replace(size, num_train=2000))
    assert 0.05 < share_right(train) < 0.3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of both sizes, and a checkpoint as stage 1 leaves it."""
    folder = tmp_path_factory.mktemp("arithmetic")
    for size, suffix in ((SMALL, ""), (LARGE, "_gpu")):
        write(dataclasses.replace(size, **FEW), folder / f"data{suffix}")
    merged = folder / "merged"
    merged.mkdir()
    hf_config = load_run_config(["experiment=arithmetic_sft"]).model.hf_config
    (merged / "config.json").write_text(json.dumps(hf_config))
    tensors = read_config(hf_config).checkpoint_tensors("float32")
    save_file({tensor.name: np.zeros(tensor.shape, np.float32) for tensor in tensors}, merged / "model.safetensors")
    save_character_tokenizer(merged, vocab_size=hf_config["vocab_size"])
    return folder


@pytest.mark.parametrize("stage", ["sft", "grpo"])
@pytest.mark.parametrize("suffix", ["", "_gpu"])
def test_both_stages_are_ready_to_train(
    made: Path, stage: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU sizes with a CPU's device: everything else about them is checked, too."""
    data = made / f"data{suffix}"
    words = [f"experiment=arithmetic_{stage}{suffix}", f"data.path={data}/train.jsonl", f"run.dir={made}/runs"]
    words += [f"data.eval_path={data}/heldout.jsonl", "cluster.dashboard=false", "cluster.device=cpu"]
    if stage == "grpo":
        words += [f"model.path={made}/merged", "model.dtype=float32", "weight_sync.transport=auto"]
    assert main(["train", *words, "--dry-run"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "300 in" in shown and "held-out 60 in" in shown
    assert "warning" not in shown


@pytest.mark.parametrize("suffix", ["", "_gpu"])
def test_the_longest_response_and_its_end_fit(suffix: str) -> None:
    config = load_run_config([f"experiment=arithmetic_grpo{suffix}"])
    size = LARGE if suffix else SMALL
    number = str(size.largest)
    longest = size.most_steps * len(f"{number}+{number}={number};") + len(f"#{number}") + len(["<eos>"])
    assert longest <= config.rollout.sampling.max_tokens
    assert len(["<bos>"]) + len(number) + size.most_steps * len(f"+{number}") + len("=") <= config.max_prompt_tokens


@pytest.mark.parametrize("suffix", ["", "_gpu"])
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("3+4=7;7-2=5;#5", 1),
        ("3+4=8;8-3=5;#5", 1),  # only the answer counts
        ("#5", 1),
        ("3+4=7;7-2=5;#6", 0),
        ("5", 0),
        ("", 0),
        ("#", 0),
        ("#5#6", 0),  # one answer, and it is the last thing that is said
        ("#6#5", 1),
        ("#0#1#2#3#4#5#6#7#8#9", 0),
        ("#5;", 0),
        ("#5 ", 0),
        ("#05", 0),
        ("#-5", 0),
        ("#\u0665", 0),  # a digit five of another script
    ],
)
def test_the_reward_is_of_the_last_result_alone(suffix: str, response: str, reward: float) -> None:
    score = load_reward(load_run_config([f"experiment=arithmetic_grpo{suffix}"]).reward).function
    found, _ = score("3+4-2=", response, {"answer": "5", "response": "3+4=7;7-2=5;#5"})
    assert found == reward
