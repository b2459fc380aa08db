"""Locks: `slipstream merge` writes the model that base and adapter of a run compute, and refuses before it reads."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases.largest_file import largest_file
from cases.run_states import make_store, write
from cases.tiny_configs import DENSE, MOE
from cases.tiny_models import hf_logits, logits_of, make_decoder, packed, relative_error, trainer_config
from safetensors.torch import load_file

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import LoraConfig, TrainMode
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, step_of
from slipstream.orchestrator.cli import merge
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.files.run_folder import to_plain
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.trainer.adapter_io import save_adapter, save_merged
from slipstream.trainer.checkpoint.rank_state import write_rank_state

LORA = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder over a base model in bfloat16, with an adapter in its checkpoint of step 5."""
    base, root = tmp_path / "base", tmp_path / "runs" / "mine"
    save_merged(make_decoder(DENSE, nonzero_b=False, dtype=torch.bfloat16), base, DENSE)
    checkpoint = root / "checkpoints" / "step-000005"
    save_adapter(make_decoder(DENSE, trainer_config(lora=LORA)), checkpoint / "adapter")
    (checkpoint / "manifest.json").write_text("{}")
    words = ["experiment=quickstart", "model=checkpoint", f"model.path={base}", "model.tokenizer=characters"]
    config = load_run_config([*words, "trainer.ep_size=1"])
    config = replace(config, trainer=replace(config.trainer, lora=LORA))
    (root / "config.yaml").write_text(yaml.safe_dump(to_plain(asdict(config))))
    prepare_model(config.model, root / "model")
    return root


def test_the_model_is_what_base_and_adapter_compute(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub import ModelCard
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["merge", str(run)]) == 0
    out, err = capsys.readouterr()
    adapter = run / "checkpoints" / "step-000005" / "adapter"
    assert out == f"model: {run / 'merged'}\n"
    began = f"merging {adapter} into {run.parents[1] / 'base'}: reads both, and writes {run / 'merged'}\n"
    assert f"{began}both are read; merging and writing\n" in err
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(run / "merged", attn_implementation="eager")
    assert model.dtype is torch.bfloat16 and not list(run.glob(".*"))
    expected, base = make_decoder(DENSE), make_decoder(DENSE, nonzero_b=False)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if "lora_" not in name:
                parameter.copy_(parameter.bfloat16())
    # Of this float32 sum each merged weight is one rounding up or down off, less than 2^-7 of itself.
    assert relative_error(hf_logits(model.float().eval(), packed()), logits_of(expected, packed())) < 2**-6
    assert relative_error(logits_of(base, packed()), logits_of(expected, packed())) > 0.1
    assert AutoTokenizer.from_pretrained(run / "merged")("ab")["input_ids"]
    card = ModelCard.load(run / "merged" / "README.md")
    assert card.data.to_dict()["library_name"] == "transformers"
    assert f"into {run.parents[1] / 'base'}, of step 5 of the Slipstream run mine (" in card.text
    assert str(adapter) in card.text


def test_a_folder_of_choice_and_a_step(run: Path, tmp_path: Path) -> None:
    assert main(["merge", str(run), "--checkpoint", "5", "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file() and not (run / "merged").exists()


def test_the_adapter_that_a_run_without_checkpoints_left_is_merged(run: Path) -> None:
    (run / "checkpoints" / "step-000005" / "adapter").rename(run / "adapter")
    shutil.rmtree(run / "checkpoints")
    assert main(["merge", str(run)]) == 0
    assert "of the end of the Slipstream run mine (" in (run / "merged" / "README.md").read_text()


@torch.no_grad()
def test_all_weights_of_a_checkpoint_are_put_together_from_the_files_of_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks, in pairs that hold every expert once. Seven experts: three on one of a pair and four on the other,
    the other way round in the next layer. Where rows are fewer than ranks, the last ones have none."""
    hf_config, full = {**MOE, "num_experts": 7}, trainer_config(TrainMode.full)
    base, root, trained = tmp_path / "base", tmp_path / "runs" / "mine", make_decoder(hf_config, full)
    save_merged(trained, base, hf_config)
    shares = ([[0, 1, 2], [3, 4, 5, 6]], [[0, 1, 2, 3], [4, 5, 6]])
    checkpoint, files = root / "checkpoints" / "step-000005", [dict[str, torch.Tensor]() for _ in range(4)]
    for name, parameter in trained.named_parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter))
            own = [(parameter, files)]
            if ".experts." in name:
                of_layer = shares[int(name.split(".")[2])]
                own = [(parameter[of_layer[ep_rank]], files[ep_rank::2]) for ep_rank in range(2)]
            for rows, of_ranks in own:
                parts = [*torch.chunk(rows, len(of_ranks)), *[rows[:0]] * 4]
                for file, part in zip(of_ranks, parts, strict=False):
                    file[f"{name}.value"] = part.clone()
    for rank, tensors in enumerate(files):
        write_rank_state(checkpoint / "trainer", rank, tensors, {}, {})
    (checkpoint / "manifest.json").write_text("{}")
    words = ["experiment=quickstart", "model=checkpoint", f"model.path={base}", "model.tokenizer=characters"]
    words += ["trainer=full", "trainer.num_ranks=4", "trainer.ep_size=2", "model.dtype=float32"]
    config = load_run_config(words)
    (root / "config.yaml").write_text(yaml.safe_dump(to_plain(asdict(config))))
    prepare_model(config.model, root / "model")
    assert main(["merge", str(root), "--checkpoint", "5"]) == 0
    save_merged(trained, tmp_path / "expected", hf_config)
    expected, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / "expected", root / "merged"))
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    (checkpoint / "trainer" / "rank-3.safetensors").unlink()
    capsys.readouterr()
    assert main(["merge", str(root), "--output", str(tmp_path / "out")]) != 0
    assert "is not the whole state of 4 trainer ranks" in capsys.readouterr().err


def test_a_checkpoint_that_is_merged_stays_while_the_run_makes_others(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run keeps its newest one, and its next steps may take less time than the read of a large base."""
    store = make_store(run, keep=1)
    monkeypatch.setattr(merge, "tell", lambda _: write(store, 6))
    assert main(["merge", str(run), "--checkpoint", "newest"]) == 0
    assert [step_of(path) for path in complete_checkpoints(store.folder)] == [5, 6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "is there already; give another folder with --output"),
        (["--checkpoint", "6"], "--checkpoint 6: give newest, best, or one of the steps 5"),
        (["--output", "{tmp}/out", "--checkpoint", "best"], "has no best checkpoint"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    words: list[str], message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "merged").mkdir()
    assert main(["merge", str(run), *(word.format(tmp=tmp_path) for word in words)]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").touch()
    assert main(["merge", str(run), "--output", str(tmp_path / "taken" / "model")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'taken' / 'model'} cannot be written ({tmp_path / 'taken'}: Not a directory)" in said
    assert "merging" not in said


def test_a_disk_without_room_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with largest_file(10_000):
        assert main(["merge", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"error: {run / 'merged'} cannot be written: File too large (" in said
    assert said.endswith("MB are free); give another folder with --output\n")
    assert {path.name for path in run.iterdir()} == {"checkpoints", "config.yaml", "model"}, "no half of it is left"


def test_runs_without_an_adapter_or_a_base_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    (tmp_path / "base" / "model.safetensors").unlink()
    assert main(["merge", str(run)]) == 2
    assert "holds no .safetensors file" in capsys.readouterr().err
