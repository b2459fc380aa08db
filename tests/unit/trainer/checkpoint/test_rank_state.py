"""A rank's state comes back as it was written; any other is refused by what differs; files are there whole or not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from slipstream.conf.schema import DType, LoraConfig, ModelConfig, OptimConfig, OptimState, TrainerConfig, TrainMode
from slipstream.trainer.checkpoint import rank_state
from slipstream.trainer.checkpoint.rank_state import (
    rank_state_parts,
    read_rank_state,
    read_rank_state_parts,
    state_layout,
    write_rank_state,
)
from slipstream.trainer.errors import CheckpointError

TENSORS = {"a.value": torch.arange(6.0).view(2, 3), "a.m": torch.tensor([-1.5, 2.0]).bfloat16(), "n": torch.tensor(7)}
SHAPES = {"a.value": [2, 3], "a.m": [2], "n": []}
LAYOUT: dict[str, Any] = {"trainer.ep_size": 2, "model.hf_config": {"sizes": (3, 4)}, "trainer.lora.rank": None}
PROGRESS = {"policy_version": 12, "num_updates": 24}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rank_state(tmp_path / "step-1" / "state", 3, TENSORS, LAYOUT, PROGRESS)
    return tmp_path / "step-1" / "state"


def read(folder: Path, rank: int = 3, layout: dict[str, Any] = LAYOUT, shapes: dict[str, list[int]] = SHAPES):
    return read_rank_state(folder, rank, layout, shapes)


def test_a_state_comes_back_as_it_was_written(folder: Path) -> None:
    tensors, progress = read(folder)
    assert progress == PROGRESS and tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-3.json", "rank-3.safetensors"]
    write_rank_state(folder, 3, TENSORS, LAYOUT, PROGRESS | {"num_updates": 25})
    assert read(folder)[1]["num_updates"] == 25


def test_a_state_in_memory_is_a_safetensors_file_and_is_refused_as_one_on_disk() -> None:
    numbers = {"codes": torch.arange(3, dtype=torch.uint8), "signed": torch.tensor([-1], dtype=torch.int8)}
    given = TENSORS | numbers | {"none": torch.empty(0, 4)}
    data = memoryview(bytearray(b"".join(rank_state_parts(given, LAYOUT, PROGRESS))))
    shapes = {name: list(tensor.shape) for name, tensor in given.items()}
    tensors, progress = read_rank_state_parts(data, 3, LAYOUT, shapes)
    assert progress == PROGRESS and int.from_bytes(data[:8], "little") % 8 == 0, "tensors are aligned"
    assert load(bytes(data)).keys() == given.keys() == tensors.keys()
    for name, tensor in given.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
    data[-1] ^= 1  # of the last tensor with elements, which is a view of it
    assert not torch.equal(tensors["signed"], numbers["signed"])
    with pytest.raises(CheckpointError, match=r"in memory was written with trainer\.ep_size=2, this run has 1"):
        read_rank_state_parts(data, 3, LAYOUT | {"trainer.ep_size": 1}, shapes)
    with pytest.raises(CheckpointError, match="cannot read the state in memory"):
        read_rank_state_parts(data[:-1], 3, LAYOUT, shapes)


@pytest.mark.parametrize(
    ("layout", "shapes", "message"),
    [
        (LAYOUT | {"trainer.ep_size": 1}, SHAPES, "with trainer.ep_size=2, this run has 1; resume with the options"),
        (LAYOUT | {"trainer.lora.rank": 8}, SHAPES, "with trainer.lora.rank=None, this run has 8"),
        (LAYOUT | {"model.hf_config": {"sizes": (3, 5)}}, SHAPES, r"with model.hf_config=.*this run has .*\[3, 5\]"),
        (LAYOUT | {"device": "cuda"}, SHAPES, "with device=None, this run has 'cuda'"),
        ({"trainer.lora.rank": None}, SHAPES, "with model.hf_config=.*, this run has None"),
        (LAYOUT, SHAPES | {"a.m": [3]}, r"tensor a.m has shape \[2\], trainer rank 3 needs \[3\]"),
        (LAYOUT, SHAPES | {"b": [1]}, r"tensor b has shape None, trainer rank 3 needs \[1\]"),
        (LAYOUT, {"a.value": [2, 3], "a.m": [2]}, r"tensor n has shape \[\], trainer rank 3 needs None"),
    ],
)
def test_another_state_is_refused_by_what_differs(
    folder: Path, layout: dict[str, Any], shapes: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(folder, layout=layout, shapes=shapes)


def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no state of trainer rank 2 in .*: rank-2\.json is missing"):
        read(folder, rank=2)
    data, meta = folder / "rank-3.safetensors", folder / "rank-3.json"
    document = json.loads(meta.read_text())
    for given in (2, None):
        meta.write_text(json.dumps({**document, "format_version": given} if given else {"layout": document["layout"]}))
        with pytest.raises(CheckpointError, match=rf"rank-3\.json has format {given}, this version reads 1"):
            read(folder)
    meta.write_text("{")
    with pytest.raises(CheckpointError, match=r"rank-3\.json is not valid JSON"):
        read(folder)
    meta.write_text(json.dumps(document))
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"cannot read .*rank-3\.safetensors"):
        read(folder)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*rank-3\.safetensors"):
        read(folder)


def test_a_file_is_there_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a second write in its midst, the first one's files are untouched."""

    def breaks(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_state, "save_file", breaks)
    with pytest.raises(OSError, match="No space left"):
        write_rank_state(folder, 3, {}, LAYOUT, {})
    assert read(folder)[1] == PROGRESS
    monkeypatch.setattr(Path, "write_text", lambda path, text, **_: breaks({}, path))
    monkeypatch.setattr(rank_state, "save_file", lambda tensors, path: path.write_bytes(b"whole"))
    with pytest.raises(OSError, match="No space left"):
        write_rank_state(folder, 3, {}, LAYOUT, {})
    assert json.loads((folder / "rank-3.json").read_text())["progress"] == PROGRESS


LORA = LoraConfig(rank=8, alpha=16.0)


def layout_of(dtype: DType = DType.bfloat16, device: str = "cpu", hf_size: int = 1, **trainer: Any) -> dict[str, Any]:
    made = replace(TrainerConfig(lora=LORA, optim=OptimConfig(state=OptimState.float32)), **trainer)
    return state_layout(ModelConfig(path="m", dtype=dtype), made, {"hidden_size": hf_size}, device)


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"dtype": DType.float32}, {"model.dtype"}),
        ({"hf_size": 2}, {"model.hf_config"}),
        ({"device": "cuda"}, {"device"}),
        ({"num_ranks": 2}, {"trainer.num_ranks"}),
        ({"num_ranks": 2, "ep_size": 2}, {"trainer.num_ranks", "trainer.ep_size"}),
        ({"lora": replace(LORA, rank=4)}, {"trainer.lora.rank"}),
        ({"lora": replace(LORA, alpha=8.0)}, {"trainer.lora.alpha"}),
        ({"lora": replace(LORA, dtype=DType.bfloat16)}, {"trainer.lora.dtype"}),
        ({"optim": OptimConfig(state=OptimState.bfloat16)}, {"trainer.optim.state"}),
        ({"optim": OptimConfig(state=OptimState.float32, lr=1.0)}, set()),
        (
            {"mode": TrainMode.full},  # which has no adapter
            {"trainer.mode", "trainer.lora.rank", "trainer.lora.alpha", "trainer.lora.dtype"},
        ),
    ],
)
def test_each_option_on_which_values_depend_is_in_the_layout(changes: dict[str, Any], changed: set[str]) -> None:
    usual, other = layout_of(), layout_of(**changes)
    assert {key for key in usual | other if usual.get(key) != other.get(key)} == changed
