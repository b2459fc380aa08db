"""Locks: a checkpoint is judged by its headers; a head stored for a tied model is the embedding table, or an error."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_configs import DENSE
from cases.tiny_models import make_decoder
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.conf.architecture.families import read_config
from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.inputs import model_files
from slipstream.orchestrator.inputs.model_files import check_checkpoint_files, read_hf_config
from slipstream.trainer.adapter_io import save_merged
from slipstream.trainer.weights.loading import CheckpointReader, load_weights
from slipstream.weight_sync.disk.safetensors_files import INDEX_NAME, read_header
from slipstream.weight_sync.layout import TensorMeta

TIED: dict[str, Any] = {**DENSE, "tie_word_embeddings": True}
FORMATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a tied model in bfloat16."""
    save_merged(make_decoder(TIED, dtype=torch.bfloat16), tmp_path, TIED)
    return tmp_path


def store_head(folder: Path, head: Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": head.contiguous()}, folder / "model.safetensors")


def check(folder: Path) -> int:
    return check_checkpoint_files(folder, read_config(TIED).checkpoint_tensors("bfloat16"))


@pytest.mark.parametrize("stored_in", [torch.bfloat16, torch.float32], ids=str)
def test_a_stored_head_that_is_the_embedding_needs_no_word(folder: Path, stored_in: torch.dtype) -> None:
    store_head(folder, load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(stored_in))
    assert check(folder) == (folder / "model.safetensors").stat().st_size
    decoder = make_decoder(TIED, dtype=torch.bfloat16)
    assert load_weights(decoder, CheckpointReader(folder, decoder.spec), seed=0).ignored == ()


@pytest.mark.parametrize("stored_in", FORMATS, ids=str)
def test_a_stored_head_of_other_values_or_of_fewer_rows_is_refused(
    folder: Path, stored_in: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "PART_ELEMENTS", 1000)
    same = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(stored_in)
    other = same.clone()
    other[-1, -1] += 1  # the last of 7 parts
    for head in (other, same[:-1]):
        store_head(folder, head)
        with pytest.raises(ConfigError, match=r"ddings=true, and lm_head\.weight is stored with other values"):
            check(folder)


def test_a_folder_that_is_no_models_is_answered_with_the_model_that_belongs_to_it(tmp_path: Path) -> None:
    def said_of(folder: Path) -> str:
        with pytest.raises(ConfigError, match=r"^MODEL=.* has no config\.json; ") as caught:
            read_hf_config(folder, "MODEL")
        return str(caught.value).partition("no config.json; ")[2]

    run, adapter = tmp_path / "my run", tmp_path / "adapter"
    step = run / "checkpoints" / "step-000003"
    for one in (step / "adapter", run / "adapter", adapter, tmp_path / "models" / "a", tmp_path / "empty"):
        one.mkdir(parents=True)
    (run / "config.yaml").touch()
    assert said_of(run) == "give a Hugging Face model folder", "nothing of it is saved"
    (step / "manifest.json").touch()
    merge = f"the model of that run is written by: slipstream merge '{run}'"
    assert said_of(run) == said_of(run / "adapter") == merge
    assert said_of(step) == said_of(step / "adapter") == f"{merge} --checkpoint 3"
    (run / "merged").mkdir()
    (run / "merged" / "config.json").write_text("{}")
    assert said_of(run) == said_of(run / "adapter") == f"give the model of that run: {run / 'merged'}"
    assert said_of(step) == f"{merge} --checkpoint 3"

    (adapter / "adapter_config.json").touch()
    assert said_of(adapter).endswith(f"or train it further: the model, and trainer.lora.init_from={adapter}")
    (tmp_path / "models" / "a" / "config.json").write_text("{}")
    assert said_of(tmp_path / "models") == f"give one in it: {tmp_path / 'models' / 'a'}"
    assert said_of(tmp_path / "empty") == "give a Hugging Face model folder"


A = TensorMeta("a.weight", (2, 3), "float32")


B = TensorMeta("b.weight", (4,), "float32")


def write_safetensors(path: Path, tensors: Sequence[TensorMeta]) -> None:
    save_file({tensor.name: torch.zeros(tensor.shape) for tensor in tensors}, path)


def test_header_is_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", [A, B])
    header = read_header(tmp_path / "model.safetensors")
    assert {name: stored.shape for name, stored in header.items()} == {"a.weight": (2, 3), "b.weight": (4,)}
    assert header["b.weight"].offset == header["a.weight"].offset + 24
    size = (tmp_path / "model.safetensors").stat().st_size
    assert check_checkpoint_files(tmp_path, [A, B]) == size


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "is cut short"),
        (lambda data: data[:20], "not a whole safetensors file"),
        (lambda data: b"", "not a whole safetensors file"),
        (lambda data: data[:8] + b"x" + data[9:], "no readable safetensors header"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_damaged_files_are_named(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, [A])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=message) as caught:
        check_checkpoint_files(tmp_path, [A])
    assert str(path) in str(caught.value)


def test_folder_without_weights_and_incomplete_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        check_checkpoint_files(tmp_path, [A])
    write_safetensors(tmp_path / "model-1.safetensors", [A])
    with pytest.raises(ConfigError, match=r"lacks b\.weight"):
        check_checkpoint_files(tmp_path, [A, B])
    with pytest.raises(ConfigError, match=r"a\.weight has shape \(2, 3\), and config\.json makes it \(3, 2\)"):
        check_checkpoint_files(tmp_path, [TensorMeta("a.weight", (3, 2), "float32")])
    write_safetensors(tmp_path / "model-2.safetensors", [B])
    check_checkpoint_files(tmp_path, [A, B])
    (tmp_path / INDEX_NAME).write_text(
        json.dumps({"weight_map": {"a.weight": "model-2.safetensors", "b.weight": "model-2.safetensors"}})
    )
    with pytest.raises(ConfigError, match=r"says that a\.weight is in model-2\.safetensors, which does not hold it"):
        check_checkpoint_files(tmp_path, [A, B])
