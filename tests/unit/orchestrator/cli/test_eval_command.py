"""`slipstream eval`: which weights and options are evaluated, bad input, and the table."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.orchestrator.checkpoints.run_checkpoint import hold
from slipstream.orchestrator.cli import evaluate
from slipstream.orchestrator.cli.evaluate import eval_config, report_of, table_of
from slipstream.orchestrator.files.run_folder import RunFolder, to_plain


def write_adapter(folder: Path, *, rank: int, alpha: float, **fields: object) -> Path:
    """Of one matrix of 64 x 64."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": alpha, **fields}))
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    a, b = np.ones((rank, 64), np.float32), np.ones((64, rank), np.float32)
    save_file({f"{prefix}A.weight": a, f"{prefix}B.weight": b}, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of steps 5 and 10, of which 5 is the best, on a disk without links."""
    root = tmp_path / "runs" / "mine"
    for step in (5, 10):
        checkpoint = root / "checkpoints" / f"step-{step:06d}"
        write_adapter(checkpoint / "adapter", rank=16, alpha=32.0)
        (checkpoint / "manifest.json").write_text("{}")
    (root / "checkpoints" / "best.json").write_text('{"step": 5}')
    config = load_run_config(["experiment=quickstart", "run.eval_every_steps=5"])
    (root / "config.yaml").write_text(yaml.safe_dump(to_plain(asdict(config))))
    return root


def test_a_checkpoint_is_evaluated_with_the_runs_options_and_no_step(run: Path) -> None:
    config, weights = eval_config(run, None, None, ["run.eval_samples_per_prompt=2"])
    assert weights == str(run / "checkpoints" / "step-000010" / "adapter")
    assert config.trainer.lora.init_from == weights and config.run.num_steps == 0
    assert config.run.dir == str(run / "evals"), "runs/latest stays the run"
    assert (config.run.name, config.run.pass_ks) == ("eval-mine", (1, 2))
    assert config.reward == load_run_config(["experiment=quickstart"]).reward
    for checkpoint in ("best", "5"):
        assert eval_config(run, None, checkpoint, [])[1] == str(run / "checkpoints" / "step-000005" / "adapter")


def test_an_adapter_alone_brings_its_rank(run: Path) -> None:
    adapter = run / "checkpoints" / "step-000005" / "adapter"
    write_adapter(adapter, rank=8, alpha=4)
    config, weights = eval_config(None, adapter, None, ["experiment=quickstart"])
    assert (config.trainer.lora.rank, config.trainer.lora.alpha, weights) == (8, 4.0, str(adapter))
    assert config.run.num_steps == 0 and config.run.dir.endswith("evals")


def test_another_adapter_in_place_of_the_runs_brings_its_rank_too(run: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path, rank=8, alpha=4, use_rslora=True)
    config, weights = eval_config(run, tmp_path, None, ["run.eval_samples_per_prompt=4"])
    assert (config.trainer.lora.rank, weights) == (8, str(tmp_path))
    assert config.trainer.lora.scale == pytest.approx(4 / 8**0.5, rel=1e-12)
    assert (config.run.dir, config.run.eval_samples_per_prompt) == (str(run / "evals"), 4)
    with pytest.raises(ConfigError, match="--checkpoint 5 has no effect with --adapter"):
        eval_config(run, tmp_path, "5", [])


def test_a_model_is_evaluated_as_it_is(run: Path, tmp_path: Path) -> None:
    model = tmp_path / "base"
    model.mkdir()
    (model / "config.json").write_text("{}")
    words = ["data.eval_path=test.jsonl", "reward=math", "rollout.max_model_len=512"]
    config, weights = eval_config(model, None, None, words)
    assert (config.model.path, weights, config.trainer.lora.init_from) == (str(model), str(model), None)
    assert (config.data.path, config.data.eval_path) == ("test.jsonl", "test.jsonl")
    assert (config.run.name, config.run.num_steps, config.run.dir) == ("eval-base", 0, "runs/evals")
    assert eval_config(None, None, None, ["model=checkpoint", f"model.path={model}", *words]) == (config, weights)
    assert eval_config(model, None, None, ["data=files", *words]) == (config, weights)
    sets = ["data.eval_path=null", "data.eval_sets.hard=hard.jsonl", "data.eval_sets.more=more.jsonl", *words[1:]]
    assert eval_config(model, None, None, sets)[0].data.path == "hard.jsonl"
    adapter = write_adapter(tmp_path / "adapter", rank=8, alpha=4)
    config, weights = eval_config(model, adapter, None, [*words, "data.path=train.jsonl"])
    assert (config.trainer.lora.init_from, config.trainer.lora.rank, weights) == (str(adapter), 8, str(adapter))
    assert (config.model.path, config.data.path) == (str(model), "train.jsonl")
    with pytest.raises(ConfigError, match="--checkpoint best is of a run"):
        eval_config(model, None, "best", words)
    with pytest.raises(ConfigError, match=r"needs held-out prompts: set data\.eval_path=FILE"):
        eval_config(model, None, None, [])


def test_the_export_of_a_run_that_trained_everything_is_no_adapter(run: Path) -> None:
    (run / "merged").mkdir()
    config, weights = eval_config(run, None, None, ["trainer.mode=full"])
    assert (config.model.path, weights, config.trainer.lora.init_from) == (*[str(run / "merged")] * 2, None)


@pytest.mark.parametrize(
    ("checkpoint", "words", "message"),
    [
        ("7", [], "--checkpoint 7: give newest, best, or one of the steps 5, 10"),
        ("newest", ["+run.num_steps=5"], "run.num_steps has no effect with slipstream eval"),
        ("newest", ["run.eval_beside=true"], "run.eval_beside has no effect with slipstream eval"),
        ("newest", ["data.eval_path=null"], "slipstream eval needs held-out prompts: set data.eval_path"),
        ("newest", ["trainer.mode=full"], "which a run with trainer.mode=full writes at its end"),
        ("5", ["trainer.mode=full"], "trains all weights .* only what it has exported is evaluated"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(run: Path, checkpoint: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        eval_config(run, None, checkpoint, words)


def test_a_checkpoint_that_the_run_removes_meanwhile_is_chosen_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Path] = []

    def hold_too_late(path: Path) -> bool:
        if not chosen:
            shutil.rmtree(path)
        chosen.append(path)
        return hold(path)

    monkeypatch.setattr(evaluate, "hold", hold_too_late)
    checkpoints = run / "checkpoints"
    assert eval_config(run, None, None, [])[1] == str(checkpoints / "step-000005" / "adapter")
    assert chosen == [checkpoints / "step-000010", checkpoints / "step-000005"]


@pytest.mark.parametrize("checkpoint", ["newest", "20"])
def test_a_checkpoint_without_its_manifest_is_named(run: Path, checkpoint: str) -> None:
    (run / "checkpoints" / "step-000020" / "adapter").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"step-000020 lacks manifest\.json.*give one of the steps 5, 10$"):
        eval_config(run, None, checkpoint, [])


def test_weights_that_are_not_there_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is neither a run folder \(runs/latest\) nor a model's \(config.json\)"):
        eval_config(tmp_path, None, "newest", [])
    with pytest.raises(ConfigError, match=r"needs a run's folder or a model's.*random weights"):
        eval_config(None, None, None, ["experiment=quickstart"])
    with pytest.raises(ConfigError, match="holds no adapter in PEFT's format"):
        eval_config(None, tmp_path, None, ["experiment=quickstart"])
    with pytest.raises(ConfigError, match="holds no adapter in PEFT's format"):
        eval_config(run, tmp_path, None, [])
    (run / "checkpoints" / "best.json").write_text('{"step": 4}')  # removed when the run went on without keeping it
    with pytest.raises(ConfigError, match=r"has no best checkpoint \(run.keep_best\); its steps are 5, 10"):
        eval_config(run, None, "best", [])


def test_a_run_that_saved_nothing_says_so(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match=r"has saved nothing: no checkpoint \(run.checkpoint_every_steps\)"):
        eval_config(run, None, None, [])


def test_the_table_has_a_line_per_set_with_standard_errors(run: Path) -> None:
    words = ["data.eval_path=null", "data.eval_sets.hard=x.jsonl", "run.eval_samples_per_prompt=2"]
    config, weights = eval_config(run, None, "newest", [*words, "rollout.eval.temperature=0.5"])
    folder = run / "evals" / "one"
    folder.mkdir(parents=True)
    (run / "evals" / "two").mkdir()
    (run / "evals" / "latest").symlink_to("two")
    row: dict[str, object] = {"step": 0, "policy_version": 0, "eval/failures": 1, "eval/total_s": 2.5}
    for prefix in ("eval/", "eval/hard/"):
        for name in ("reward", "pass_at_1", "pass_at_2"):
            row |= {prefix + name: 0.5 if prefix == "eval/hard/" else 0.25, f"{prefix}{name}_se": 0.125}
        row |= {f"{prefix}majority": None, f"{prefix}majority_se": None}
    (folder / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    report = report_of(config, weights, RunFolder(folder))
    written = json.loads((folder / "evaluation.json").read_text())
    assert written["sets"]["hard"]["pass_at_2"] == {"mean": 0.5, "se": 0.125}
    lines = table_of(report).splitlines()
    assert lines[0].split() == ["set", "reward", "pass@1", "pass@2", "majority"]
    assert lines[1] == "hard  0.500 +- 0.125  0.500 +- 0.125  0.500 +- 0.125  -"
    assert "2 responses to each prompt at temperature 0.5, 1 without a reward" in lines


def test_a_run_of_no_step_keeps_what_a_finished_run_had(run: Path) -> None:
    config, _ = eval_config(run, None, "newest", [])
    assert replace(config.run, num_steps=110).is_due(0, 110) and config.run.is_due(0, 0), "the evaluation is awaited"
