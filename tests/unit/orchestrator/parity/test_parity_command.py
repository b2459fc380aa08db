"""What `slipstream parity` compares, and what it says of it and meanwhile. No engine is started."""

import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config, resolved_yaml
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.files.outputs import output_in
from slipstream.orchestrator.files.run_folder import RunFolder, write_description
from slipstream.orchestrator.parity.command import ParityOptions, load_config, run_parity
from slipstream.orchestrator.parity.compare import difference, verdict
from slipstream.orchestrator.parity.measure import ParityReport, Sampled, Swap, agreements
from slipstream.orchestrator.parity.progress import Count, telling
from slipstream.orchestrator.parity.report import print_report, write_files

TINY = ["model=tiny_qwen3_moe", "data=letters"]


def test_lengths_of_the_engine_are_those_of_the_question():
    config, has_prompts = load_config(ParityOptions(prompt_tokens=10, max_tokens=20), ["model=tiny_qwen3_moe"])
    assert (config.rollout.max_model_len, config.rollout.sampling.max_tokens) == (31, 20)
    assert not has_prompts
    assert load_config(ParityOptions(), TINY)[1]


def test_one_rank_and_one_engine_whatever_the_run_has():
    config, _ = load_config(ParityOptions(), [*TINY, "trainer.num_ranks=2", "trainer.ep_size=2"])
    assert (config.trainer.num_ranks, config.trainer.ep_size, config.rollout.num_workers) == (1, 1, 1)


def test_a_run_folder_brings_its_options_and_its_adapter(tmp_path: Path):
    config = load_run_config([*TINY, "rollout=small", "run.seed=7"])
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    with pytest.raises(ConfigError, match=r"has no trained adapter.*has the run ended\?"):
        load_config(ParityOptions(model=tmp_path), [])
    (tmp_path / "adapter").mkdir()
    found, _ = load_config(ParityOptions(model=tmp_path), ["trainer.numerics.match=transformers"])
    assert found.trainer.lora.init_from == str(tmp_path / "adapter")
    assert found.run.seed == 7
    assert str(found.trainer.numerics.match) == "transformers"


def test_a_run_is_compared_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its relative paths are from where it was started; those of the command from where the user stands."""
    began, here = tmp_path / "began", tmp_path / "here"
    words = ["model=checkpoint", "model.path=base", "data=letters", "rollout=small", "trainer.lora.rank=16"]
    config = load_run_config(words)
    for folder in (here, began / "base", began / "run" / "adapter"):
        folder.mkdir(parents=True)
    (began / "base" / "config.json").write_text(
        json.dumps(dict(load_run_config([*TINY, "rollout=small"]).model.hf_config))
    )
    a, b = np.ones((16, 64), np.float32), np.ones((128, 16), np.float32)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file({f"{prefix}A.weight": a, f"{prefix}B.weight": b}, began / "run" / "adapter" / "adapter_model.safetensors")
    (began / "run" / "adapter" / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32}')
    monkeypatch.chdir(began)
    write_description(RunFolder(began / "run"), config, [])
    monkeypatch.chdir(here)
    (here / "usual.json").write_text('{"differences": []}')
    (here / "taken").touch()
    assert main(["parity", "../began/run", "--usual", "usual.json", "--output", "taken"]) == 2
    assert f"error: --output={here / 'taken'} cannot be written" in capsys.readouterr().err


def test_what_the_trainer_cannot_compute_is_refused_before_the_engine_starts(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32, "use_dora": true}')
    words = [*TINY, f"trainer.lora.init_from={tmp_path}"]
    with pytest.raises(ConfigError, match="has use_dora=true"):
        run_parity(ParityOptions(output=tmp_path / "parity"), words, lambda phase: pytest.fail(phase))
    hf_config = dict(load_run_config([*TINY, "rollout=small"]).model.hf_config) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    options = ParityOptions(model=tmp_path, output=tmp_path / "parity")
    with pytest.raises(ConfigError, match="embedding_on_host=true needs a head of its own"):
        run_parity(options, ["trainer.embedding_on_host=true"], lambda phase: pytest.fail(phase))
    assert not (tmp_path / "parity").exists()


def test_a_run_that_trained_everything_brings_its_merged_weights(tmp_path: Path):
    config = load_run_config([*TINY, "rollout=small", "trainer=full"])
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    (tmp_path / "merged").mkdir()
    found, _ = load_config(ParityOptions(model=tmp_path), [])
    assert found.model.path == str(tmp_path / "merged")
    assert found.model.dtype == config.model.dtype


def made_report() -> ParityReport:
    reference = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    found = [
        difference(name, name, reference, reference * (1 + 0.01 * (layer == 1)))
        for layer, name in enumerate(f"layers.{layer}.self_attn.o_proj" for layer in range(3))
    ]
    sentence, agrees = verdict(found)
    sampled = [Sampled(2, (5, 6, 7, 8), (-1.0, -2.0), (-1.1, -2.0))]
    others = {"transformers": [torch.tensor([-1.2, -2.0])], "trainer": [torch.tensor([-1.4, -2.0])]}
    swaps = [Swap("", 0.05), Swap("self_attn", 0.0), Swap("mlp", 0.05), Swap("layers.1.self_attn", 0.001)]
    return ParityReport(
        model="tiny", device="cpu", dtype="float32", num_prompts=1, max_tokens=2, entropy=3.0,
        matrix=agreements(sampled, others),
        differences=found, chained={"layers.1.stream": 0.0, "layers.2.stream": 0.01}, swaps=swaps, flipped=None,
        sentence=sentence, agrees=agrees,
    )  # fmt: skip


def test_the_matrix_holds_every_pair_and_the_floor():
    matrix = made_report().matrix
    pairs = "engine, engine prefill", "engine, transformers", "engine, trainer", "transformers, trainer"
    assert tuple(matrix) == pairs
    largest = [figures["max_abs_log_ratio"] for figures in matrix.values()]
    assert largest == pytest.approx([0.1, 0.2, 0.4, 0.2], rel=1e-5)


def test_the_report_names_the_place_in_tables_file_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = made_report()
    print_report(report)
    shown = capsys.readouterr().out
    assert "They part at layer 1, self_attn.o_proj: its output differs by 1.0e-02 of its size" in shown
    assert "..." not in shown, "no figure is cut off"
    assert "…" not in shown, "no figure is cut off"
    figures, picture = write_files(report, tmp_path)
    written = json.loads(figures.read_text())
    assert written["sentence"] == report.sentence
    assert [one["relative"] for one in written["differences"]] == pytest.approx([0.0, 0.01, 0.0], rel=1e-4)
    assert picture.read_bytes().startswith(b"\x89PNG")
    write_files(replace(report, matrix=agreements([Sampled(1, (1, 2), (-1.0,), (-1.0,))], {})), tmp_path)


def test_a_part_is_told_as_it_begins_and_then_how_far_it_is() -> None:
    said, is_told, count = list[str](), threading.Event(), Count(60)

    def say(text: str) -> None:
        said.append(text)
        if text == "trainer: passes: 5 of 60":
            is_told.set()

    with telling(say, "trainer: passes", lambda: str(count), every_s=0.001):
        count.done = 5
        assert is_told.wait(60)
    assert said[0] == "trainer: passes"


def test_nothing_is_told_after_a_part_that_failed() -> None:
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError), telling(lambda text: None, "engine: start", lambda: "", every_s=3600):
        raise RuntimeError
    assert set(threading.enumerate()) <= before


def test_output_of_children_goes_into_the_file_and_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    file = tmp_path / "engine.log"
    with pytest.raises(RuntimeError), output_in(file):
        os.write(1, b"own ")
        subprocess.run(["sh", "-c", "printf child; printf error >&2"], check=True)
        raise RuntimeError
    os.write(2, b"on the terminal")
    assert file.read_bytes() == b"own childerror"
    assert capfd.readouterr() == ("", "on the terminal")
