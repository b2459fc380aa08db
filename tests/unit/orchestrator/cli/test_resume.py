"""slipstream resume: with the options of the run, from any folder, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.command import READY, fake_run

from slipstream.conf.load import load_resolved_yaml, load_run_config
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.cli.start_commands import AT_ONCE
from slipstream.orchestrator.control.control_folder import alive
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.files.run_folder import RunFolder, write_description

pytestmark = pytest.mark.usefixtures("somewhere_else")


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run folder with options of its own and one checkpoint, of step 3."""
    config = load_run_config([*READY[1:], "run.seed=7", "model.hf_config.rope_theta=5.0"])
    folder = RunFolder(tmp_path / "old run")
    folder.root.mkdir()
    write_description(folder, config, [])
    store = CheckpointStore(folder.checkpoints, keep=2, options=fingerprint(config))
    store.finish(store.begin(3), RunState(3, 3, {"epoch": 0}, {}, BufferState(3)))
    return folder.root


def test_resume_goes_on_with_the_options_of_the_run(old_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake_run(monkeypatch, lambda config, words, folder: calls.append((config, words)))
    words = ["run.num_steps=200", "trainer.optim.lr=1e-3"]
    assert main(["resume", str(old_run), *words]) == 0
    ((config, told),) = calls
    assert told == words
    expected = load_run_config([*READY[1:], "run.seed=7", "model.hf_config.rope_theta=5.0", *words])
    assert replace(config, run=replace(config.run, resume=None)) == expected
    assert config.run.resume == str(old_run)


def test_resume_works_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Relative paths of the options are from where the run was started; a word of the command names what is here."""
    began, here = tmp_path / "began", tmp_path / "here"
    for folder in (began, here):
        folder.mkdir()
    row = json.dumps({"prompt": "a", "answer": "a"}) + "\n"
    (began / "prompts.jsonl").write_text(row)
    (began / "reward.py").write_text("def score(prompt, response, fields):\n    return 0.5\n")
    (here / "other rows.jsonl").write_text(row)
    monkeypatch.chdir(began)
    opened: list[RunFolder] = []

    def run(config: Any, words: list[str], folder: RunFolder) -> None:
        opened.append(folder)
        write_description(folder, config, words)
        (folder.checkpoints / "step-000003").parent.mkdir(exist_ok=True)
        store = CheckpointStore(folder.checkpoints, keep=2, options=fingerprint(config))
        store.finish(store.begin(3), RunState(3, 3, {"epoch": 0}, {}, BufferState(3)))

    fake_run(monkeypatch, run)
    own = ["data.path=prompts.jsonl", "data.eval_path=prompts.jsonl", "reward.kind=reward.py:score"]
    assert main([*READY, "reward=exact_match", *own]) == 0
    calls: list[Any] = []
    fake_run(monkeypatch, lambda config, words, folder: calls.append((config, folder)))
    monkeypatch.chdir(here)
    assert main(["resume", str(opened[0].root), "data.eval_path=other rows.jsonl"]) == 0
    assert f"relative paths of the run's options start at {began}" in capsys.readouterr().err
    ((config, folder),) = calls
    assert (config.data.path, config.data.eval_path) == ("prompts.jsonl", str(here / "other rows.jsonl"))
    assert (folder.root, Path.cwd()) == (opened[0].root, began)
    for word in ("data.path=no.jsonl", "+data.eval_sets.one=no.jsonl", "reward.kind=no.py:f", "model.tokenizer=no"):
        monkeypatch.chdir(here)
        assert main(["resume", str(opened[0].root), word]) == 2
        place = word.partition("=")[2].removesuffix(":f")
        refused = f"error: {word}: there is no {began / place}, where the run was started, and no {here / place}\n"
        assert capsys.readouterr().err.endswith(refused)
    for word in ("data.eval_path=null", "model.tokenizer=characters", "reward.kind=exact_match"):
        monkeypatch.chdir(here)
        assert main(["resume", str(opened[0].root), word]) == 0, word
    (began / "reward.py").unlink()
    monkeypatch.chdir(here)
    assert main(["resume", str(opened[0].root)]) == 2
    assert f"there is no file {began / 'reward.py'}" in capsys.readouterr().err
    copy = folder.root / "reward_source.py"
    copy.write_text("def score(prompt, response, fields):\n    return 0.5\n")
    assert main(["resume", str(folder.root)]) == 2
    word = f"reward.kind={copy}:score"
    assert word in capsys.readouterr().err
    assert main(["resume", str(folder.root), word]) == 0


def test_a_run_that_fails_after_its_last_step_is_not_told_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Any, words: list[str], folder: RunFolder) -> None:
        with alive(folder.root):
            store = CheckpointStore(folder.checkpoints, keep=1, options=fingerprint(config))
            store.finish(store.begin(2), RunState(2, 0, {}, {}, BufferState(2)))
            raise TrainingStopped("no episode had a reward")

    fake_run(monkeypatch, run)
    assert main([*READY, "run.num_steps=2"]) == 1
    said = capsys.readouterr().err
    assert "All 2 steps are made, so a resume has nothing left to train: start again with slipstream train" in said
    assert "go on with" not in said and said.endswith(" run.num_steps=MORE\n")
    assert main([*READY, "run.num_steps=3"]) == 1
    assert "Step 2 is saved; go on with: slipstream resume " in capsys.readouterr().err


def test_resume_without_starting_says_what_it_would_do(
    old_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(monkeypatch, lambda *_: pytest.fail("the run was started"))
    assert main(["resume", str(old_run), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "goes on from step 3\n" in said and f"a checkpoint of {old_run}\n" in said
    assert main(["resume", str(old_run), "run.num_steps=9", "--dry-run"]) == 0
    assert re.search(r"goes on from step 3, with another run.num_steps: \d+ before, 9 now\n", capsys.readouterr().out)
    assert main(["resume", str(old_run), "run.num_steps=9", "--cfg", "job"]) == 0
    assert load_resolved_yaml(capsys.readouterr().out).run.num_steps == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "slipstream resume needs a run folder, e.g. slipstream resume runs/latest"),
        (["run.num_steps=9"], "slipstream resume needs a run folder"),
        (["nowhere"], "nowhere is not a run folder"),
        (["old run", "trainer=full"], "trainer=full: the run has its options already, and takes no presets"),
        (["old run", "run.resume=x"], "run.resume has no effect with slipstream resume"),
        (["old run", "run.dir=x"], "run.dir has no effect with slipstream resume"),
        (["old run", "run.num_step=4"], "unknown option run.num_step. Did you mean run.num_steps?"),
    ],
)
def test_resume_refuses(
    words: list[str], message: str, old_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(monkeypatch, lambda *_: pytest.fail("the run was started"))
    assert main(["resume", *words]) == 2
    err = capsys.readouterr().err.removeprefix(f"{AT_ONCE}\n")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("stop", "is not a run folder"),
        ("recover", "is not a run folder"),
        ("merge", "is not a run folder"),
        ("resume", "is not a run folder"),
        ("eval", "is neither a run folder"),
    ],
)
def test_a_folder_may_have_an_equals_sign(
    command: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lr=1e-4"
    folder.mkdir()
    assert main([command, str(folder)]) == 2
    err = capsys.readouterr().err
    assert "lr=1e-4" in err and found in err


@pytest.mark.parametrize("saved", [b"run: {num_steps: 3", b"\xff\xfe", b"run: {no_such_option: 1}", b"run"])
def test_a_run_whose_options_cannot_be_read_is_not_resumed(
    saved: bytes, old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old_run / "config.yaml").write_bytes(saved)
    assert main(["resume", str(old_run)]) == 2
    err = capsys.readouterr().err
    assert str(old_run / "config.yaml") in err
    assert "Traceback" not in err
