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
def test_a_working_goes_through_every_operand_within_the_range_and_is_right_unless_it_is_to_be_wrong(
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

    right = working(numbers, 0.0, task.largest, rng)
    assert right.endswith(f";#{sum(numbers)}")
    assert all(eval(a + b) == int(c) for a, b, c in STEP.findall(right))


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_answers_are_right_no_sum_is_there_twice_and_demonstrations_leave_something_to_find(size: Task) -> None:
    """A model that imitates them is to start below 0.3, and above what a group of 16 never sees."""
    size = dataclasses.replace(size, num_train=2000, num_heldout=60)
    train, heldout = make_rows(size)
    assert (len(train), len(heldout), len({row["prompt"] for row in train + heldout})) == (2000, 60, 2060)
    for row in train + heldout:
        assert str(eval(row["prompt"].removesuffix("="))) == row["answer"]
    assert 0.05 < share_right(train) < 0.3
    assert (train, heldout) == make_rows(size)
    assert (train, heldout) != make_rows(dataclasses.replace(size, seed=size.seed + 1))


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


RIGHT = ["3+4=7;7-2=5;#5", "3+4=8;8-3=5;#5", "#5", "#6#5"]
WRONG = ["3+4=7;7-2=5;#6", "5", "", "#", "#5#6", "#0#1#2#3#4#5#6#7#8#9", "#5;", "#5 ", "#05", "#-5", "#\u0665"]
"""One answer, and it is the last thing that is said. The last one is a digit five of another script."""


@pytest.mark.parametrize("suffix", ["", "_gpu"])
def test_the_reward_is_of_the_last_result_alone(suffix: str) -> None:
    score = load_reward(load_run_config([f"experiment=arithmetic_grpo{suffix}"]).reward).function
    for responses, reward in ((RIGHT, 1), (WRONG, 0)):
        for response in responses:
            found, _ = score("3+4-2=", response, {"answer": "5", "response": "3+4=7;7-2=5;#5"})
            assert found == reward, response
