"""A run that cannot be resumed: one clear message and nothing started; and which run has nothing left to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.conf.json_files import JsonObject
from slipstream.conf.load import load_run_config
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint, has_nothing_left
from slipstream.orchestrator.control.control_folder import alive, state_of
from slipstream.orchestrator.data.training_stream import Items
from slipstream.orchestrator.errors import DiskFull, TrainingStopped
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.inputs.resumed import check_rows_go_on
from slipstream.orchestrator.inputs.rows.prompt_rows import PromptRows, RowEncoder
from slipstream.rollout.types import Prompt

Refuse = Callable[..., str]
DATA = ("data=files", "data.eval_path=null")
MIXED = ("data.sources=[a.jsonl,b.jsonl]",)


def rows_of(path: Path, letters: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": letter, "answer": letter}) + "\n" for letter in letters))
    return path


def prompts_of(*words: str) -> PromptRows:
    config = load_run_config(["experiment=quickstart", *words])
    return PromptRows(config, RowEncoder(config))


def cursor_of(*words: str) -> JsonObject:
    return prompts_of(*words).stream().state_dict()


def items_of(*words: str) -> list[Items[Prompt]]:
    return [Items(prompts_of(*words).training(), 0)]


def run_of(folder: Path, cursor: JsonObject, *words: str) -> Path:
    """A run folder with one checkpoint, of the quick start with these words and this cursor; returns the checkpoint."""
    config = load_run_config(["experiment=quickstart", *words])
    store = CheckpointStore(folder / "checkpoints", keep=1, options=fingerprint(config))
    partial = store.begin(3)
    (partial / "trainer" / "rank-0.safetensors").write_bytes(bytes(100))
    return store.finish(partial, RunState(3, 3, cursor, {}, BufferState(3)))


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    return run_of(tmp_path / "old", {"epoch": 0})


def test_run_to_resume_is_damaged(refuse: Refuse, old_run: Path) -> None:
    (old_run / "trainer" / "rank-0.safetensors").write_bytes(bytes(99) + b"x")
    message = refuse("run.resume=old")
    assert "run.resume=old holds no whole checkpoint" in message and "start a new run instead" in message
    assert "step-000003 is damaged: trainer/rank-0.safetensors" in message
    for manifest in ("", "[]", "{}"):
        (old_run / "manifest.json").write_text(manifest)
        assert "step-000003" in refuse("run.resume=old")


def test_run_to_resume_had_other_options(refuse: Refuse, old_run: Path, tmp_path: Path) -> None:
    message = refuse("run.resume=old", "trainer.lora.rank=8")
    assert "trainer.lora.rank: 16 there, 8 now" in message and "moved" not in message
    message = refuse("run.resume=old", f"data.path={rows_of(tmp_path / 'prompts.jsonl', 'a')}")
    assert "use the same ones to resume; put a file or folder that has moved, or a link to it, where it was" in message


@pytest.mark.parametrize(
    ("before", "now", "problem"),
    [
        ((), ("data.order=given",), "shuffle is False and was True; resume with the data.order"),
        (("data.order=given",), (), "shuffle is True and was False; resume with the data.order"),
        (MIXED, (*MIXED, "data.order=given"), "shuffle is False and was True; resume with the data.order"),
        (("data.stream=true",), ("data.stream=true", "data.order=given"), "shuffle is False and was True"),
    ],
)
def test_run_to_resume_had_another_order(
    before: tuple[str, ...], now: tuple[str, ...], problem: str, refuse: Refuse, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path / "a.jsonl", "xyz"), rows_of(tmp_path / "b.jsonl", "de")
    where = () if MIXED[0] in now else (f"data.path={rows[0]}",)
    before, now = ((*DATA, *where, *words) for words in (before, now))
    run_of(tmp_path / "old", cursor_of(*before), *before)
    assert problem in refuse("run.resume=old", *now)


@pytest.mark.parametrize("order", ["shuffled", "given", "middling"])
def test_run_to_resume_had_other_rows(refuse: Refuse, order: str, tmp_path: Path) -> None:
    words = (*DATA, f"data.path={rows_of(tmp_path / 'a.jsonl', 'xyz')}", f"data.order={order}")
    run_of(tmp_path / "old", cursor_of(*words), *words)
    check_rows_go_on(load_run_config(["experiment=quickstart", "run.resume=old", *words]), items_of(*words))
    rows_of(tmp_path / "a.jsonl", "xyw")
    message = refuse("run.resume=old", *words)
    assert "a.jsonl have changed, or become other tokens; resume with the rows that the run began with" in message


NOTHING_LEFT = "run.num_steps=3: nothing is left to train; raise run.num_steps to go on"


def test_run_to_resume_is_finished(refuse: Refuse, old_run: Path) -> None:
    assert "has done 3 steps, and run.num_steps=2: nothing is left" in refuse("run.resume=old", "run.num_steps=2")
    (old_run.parent.parent / "adapter").mkdir()
    assert NOTHING_LEFT in refuse("run.resume=old", "run.num_steps=3")


def test_run_to_resume_has_failed_after_its_last_step(refuse: Refuse, old_run: Path) -> None:
    run = old_run.parent.parent
    with pytest.raises(TrainingStopped), alive(run):
        raise TrainingStopped("the agent failed in every episode")
    said = refuse("run.resume=old", "run.num_steps=3")
    assert f"{NOTHING_LEFT}, or start again with slipstream train" in said
    assert state_of(RunFolder(run), 3, 3) == ("failed", "TrainingStopped: the agent failed in every episode")


@pytest.fixture
def folder(old_run: Path) -> RunFolder:
    return RunFolder(old_run.parent.parent)


@pytest.mark.parametrize("exported", ["adapter", "merged"])
def test_a_run_that_exported_what_it_trained_has_nothing_left(exported: str, folder: RunFolder) -> None:
    assert not has_nothing_left(folder, 3) and has_nothing_left(folder, 2)
    getattr(folder, exported).mkdir()
    assert has_nothing_left(folder, 3) and not has_nothing_left(folder, 4)
    shutil.rmtree(folder.checkpoints)
    assert not has_nothing_left(folder, 0), "no step of it is saved"


@pytest.mark.parametrize(
    ("error", "num_steps", "is_over"),
    [
        (TrainingStopped("no reward"), 3, True),
        (TrainingStopped("no reward"), 4, False),
        (DiskFull("of the export"), 3, False),
        (KeyboardInterrupt(), 3, False),
    ],
)
def test_a_run_of_all_steps_is_resumed_for_its_export_alone(
    error: BaseException, num_steps: int, is_over: bool, folder: RunFolder
) -> None:
    assert not has_nothing_left(folder, 3), "it was killed"
    folder.adapter.mkdir()  # of an earlier part of the run
    with pytest.raises(type(error)), alive(folder.root):
        assert not has_nothing_left(folder, 3), "should it be killed now"
        raise error
    assert has_nothing_left(folder, num_steps) == is_over


def test_a_run_that_has_finished_has_nothing_left_as_long_as_its_export_is_there(folder: RunFolder) -> None:
    with alive(folder.root):
        folder.adapter.mkdir()
    assert has_nothing_left(folder, 3) and state_of(folder, 3, 3) == ("finished", None)
    folder.adapter.rmdir()
    assert not has_nothing_left(folder, 3)


def test_a_run_that_was_stopped_is_not_finished_by_an_earlier_export(folder: RunFolder) -> None:
    folder.adapter.mkdir()
    with pytest.raises(KeyboardInterrupt), alive(folder.root):
        raise KeyboardInterrupt
    assert state_of(folder, 3, 3) == ("stopped", None)
