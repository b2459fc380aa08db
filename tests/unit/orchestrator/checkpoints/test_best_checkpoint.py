"""A resumed run compares an evaluation with the best one before only where both figures mean the same."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from fakes.loop import make_config

from slipstream.conf.schema import JudgeConfig, Objective, RunConfig
from slipstream.orchestrator.checkpoints.best_checkpoint import BestCheckpoint, options_behind
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, complete_checkpoints, step_of

Change = Callable[[RunConfig], RunConfig]


def _with(section: str, **options: object) -> Change:
    return lambda config: replace(config, **{section: replace(getattr(config, section), **options)})


def _rollout(section: str, **options: object) -> Change:
    return lambda c: replace(
        c, rollout=replace(c.rollout, **{section: replace(getattr(c.rollout, section), **options)})
    )


OTHER_MEANINGS = [
    (
        "eval/reward",
        _with("data", eval_path="harder.jsonl"),
        "held-out rows: ['held_out.jsonl'] before, ['harder.jsonl'] now",
    ),
    (
        "eval/reward",
        _with("run", keep_best="eval/pass_at_1"),
        "run.keep_best: 'eval/reward' before, 'eval/pass_at_1' now",
    ),
    ("eval/reward", _with("reward", weight=0.5), "reward.weight: 1.0 before, 0.5 now"),
    ("eval/reward", _rollout("sampling", max_tokens=3), "rollout.sampling.max_tokens"),
    ("eval/reward", _rollout("eval", temperature=0.25), "rollout.eval.temperature: None before, 0.25 now"),
    ("eval/reward", _rollout("episodes", max_turns=3), "rollout.episodes.max_turns: 32 before, 3 now"),
    ("eval/reward", _with("rollout", agent="a.py:play"), "rollout.agent: 'play.py:play' before, 'a.py:play' now"),
    ("eval/reward", _with("rollout", max_model_len=999), "rollout.max_model_len"),
    ("eval/reward", _with("reward", length_penalty=0.5), "reward.length_penalty: 0.0 before, 0.5 now"),
    (
        "eval/reward",
        _with("reward", parts={"right": {"kind": "math"}}),
        "reward.parts.right.kind: not there before, 'math' now",
    ),
    ("eval/reward", _with("data", drop_too_long=True), "prompt tokens"),
    ("eval/pass_at_1", _with("run", eval_right_from=0.5), "run.eval_right_from: 1.0 before, 0.5 now"),
    ("eval/majority", _with("run", eval_samples_per_prompt=4), "run.eval_samples_per_prompt"),
    ("eval/dpo_loss", _with("algorithm", dpo_beta=0.5), "algorithm.dpo_beta: 0.1 before, 0.5 now"),
]
SAME_MEANINGS = [
    ("eval/reward", _with("run", eval_right_from=0.5)),
    ("eval/reward", _with("reward", timeout_s=99.0, num_processes=3)),
    ("eval/reward", _with("algorithm", kl_coef=0.5)),
    ("eval/reward", _with("data", max_sequence_tokens=99)),
    ("eval/reward", _rollout("eval", seed=5)),
    ("eval/reward", _rollout("episodes", timeout_s=9.0, env=("KEY",), address="0.0.0.0:8100")),
    ("eval/reward", _with("reward", pattern="x", judge=JudgeConfig(model="m"), overlong_penalty=9.0)),
    ("eval/pass_at_1", _with("reward", overlong_tokens=2, length_penalty=0.5)),
    ("eval/dpo_accuracy", _with("algorithm", dpo_beta=0.5)),
]


def _two_checkpoints(
    tmp_path: Path, metric: str, change: Change = lambda config: config
) -> tuple[CheckpointStore, RunConfig]:
    """Steps 1 and 2 of an agent's run, of which step 1 is the best."""
    config = _with("data", eval_path="held_out.jsonl")(_with("run", keep_best=metric)(make_config()))
    config = change(_with("rollout", agent="play.py:play")(config))
    if "dpo" in metric:
        config = _with("algorithm", objective=Objective.dpo)(config)
    store = CheckpointStore(tmp_path, keep=1, options={})
    best = BestCheckpoint(store, config, up_to_step=0)
    for step in (1, 2):
        best.evaluating(step)
        store.finish(store.begin(step), RunState(step, step, {}, {}, BufferState()))
        best.judge(step, 0.5)
    return store, config


@pytest.mark.parametrize(("metric", "change", "said"), OTHER_MEANINGS)
def test_a_figure_by_other_options_is_not_compared_with(
    metric: str, change: Change, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that was the best stays until another one is."""
    store, config = _two_checkpoints(tmp_path, metric)
    resumed = BestCheckpoint(store, change(config), up_to_step=2)
    (message,) = caplog.messages
    assert message.startswith("step 1 was the best by another figure, and one is chosen anew (") and said in message
    store.prune()
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1, 2]
    resumed.judge(2, 99.0 if "loss" in metric else -99.0)
    assert (tmp_path / "best").resolve().name == "step-000002"
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [2]


@pytest.mark.parametrize(("metric", "change"), SAME_MEANINGS)
def test_a_figure_is_compared_with_whatever_else_has_changed(
    metric: str, change: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, config = _two_checkpoints(tmp_path, metric)
    resumed = BestCheckpoint(store, change(config), up_to_step=2)
    for step in (2, 1):
        resumed.judge(step, 0.6 if "loss" in metric else 0.4)
    assert not caplog.messages
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (_with("rollout", agent=None), _rollout("episodes", max_turns=3)),
        (_with("rollout", agent=None), _with("rollout", max_model_len=999)),
        (_rollout("eval", temperature=0.25), _rollout("sampling", temperature=0.5)),
        (_rollout("eval", temperature=0.0), _rollout("eval", top_k=5)),
        (_with("reward", parts={"right": {"kind": "math"}}), _with("reward", kind="math", weight=0.5)),
    ],
)
def test_an_option_that_this_run_does_not_read_changes_no_figure(before: Change, change: Change) -> None:
    config = before(_with("run", keep_best="eval/reward")(_with("data", eval_path="held_out.jsonl")(make_config())))
    assert options_behind(change(config)) == options_behind(config)


def test_a_disk_without_links_has_the_best_checkpoint_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError(errno.EOPNOTSUPP, "no links here")))
    store, _ = _two_checkpoints(tmp_path, "eval/reward")
    assert f"{tmp_path}/best does not lead to step-000001: no links here" in caplog.messages
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 1 and store.spared == {1}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("right.py", "reward.kind"),
        ("grade.txt", "reward.judge.prompt_file"),
        ("play.py", "rollout.agent"),
        ("held_out.jsonl", "held_out.jsonl"),
    ],
)
def test_a_figure_by_another_content_of_a_file_is_not_compared_with(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text("before")
    judge = JudgeConfig(base_url="http://127.0.0.1:1/v1", model="m", prompt_file=file)
    reward = {"kind": "judge", "judge": judge} if file == "grade.txt" else {"kind": "right.py:right"}
    store, config = _two_checkpoints(tmp_path, "eval/reward", _with("reward", **reward))
    BestCheckpoint(store, config, up_to_step=2)
    assert not caplog.messages
    Path(file).write_text("after")
    BestCheckpoint(store, config, up_to_step=2).judge(2, -99.0)
    assert f"the file of {name}: " in caplog.messages[0]
    assert (tmp_path / "best").resolve().name == "step-000002"


@pytest.mark.parametrize(("change", "best"), [(lambda config: config, 3), (_with("data", eval_path="harder.jsonl"), 1)])
def test_a_figure_without_a_verdict_counts_if_it_means_the_same(change: Change, best: int, tmp_path: Path) -> None:
    """A killed run had written the rows; a figure by other options is no candidate, at any later resume either."""
    store, config = _two_checkpoints(tmp_path / "checkpoints", "eval/reward")
    store.spared |= {2, 3}
    for step in (3, 4):
        store.finish(store.begin(step), RunState(step, step, {}, {}, BufferState()))
    figures = {1: 0.5, 2: 0.6, 3: 0.75, 5: 9.0}
    rows = [json.dumps({"step": step, "eval/reward": value}) for step, value in figures.items()]
    (tmp_path / "evaluations.jsonl").write_text("\n".join([*rows, ""]))
    for _ in range(2):
        BestCheckpoint(CheckpointStore(store.folder, keep=1, options={}), change(config), up_to_step=4)
        assert json.loads((store.folder / "best.json").read_text())["step"] == best
        assert (store.folder / "best").resolve().name == f"step-{best:06d}"
    BestCheckpoint(store, config, up_to_step=0)
    assert not (store.folder / "best").is_symlink(), "its step is made again"
