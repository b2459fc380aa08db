"""The shares that ranks read of a checkpoint are all of it, once; what they publish is what is on disk."""

import json
from pathlib import Path

import pytest
import torch
from cases.plan_tables import by_name
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import PlainEngine, checkpoint, engine_layout, expected_of
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from slipstream.conf.errors import ConfigError
from slipstream.weight_sync.disk import safetensors_source
from slipstream.weight_sync.disk.safetensors_files import INDEX_NAME, StoredTensor, read_index
from slipstream.weight_sync.disk.safetensors_source import Checkpoint, plan_blocks
from slipstream.weight_sync.errors import WeightSyncError
from slipstream.weight_sync.layout import Region
from slipstream.weight_sync.pipeline.pipeline import Pipeline
from slipstream.weight_sync.plan.plan import build_plan


def save(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 2) -> None:
    """A checkpoint in several files with an index, as Hugging Face writes it."""
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        mine = names[number::num_files]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=3), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 64),
    st.integers(1, 3),
)
def test_shares_are_every_row_once_and_differ_by_a_row(
    shapes: list[list[int]], world_size: int, block_bytes: int, num_files: int
) -> None:
    index: dict[str, StoredTensor] = {}
    ends = [64] * num_files
    sizes = []
    for number, shape in enumerate(shapes):
        size = 2 * torch.Size(shape).numel()
        file = number % num_files
        index[f"t{number}"] = StoredTensor(Path(f"{file}.safetensors"), ends[file], tuple(shape), "BF16")
        ends[file] += size
        sizes.append(size)
    rows: dict[str, list[tuple[int, int]]] = {}
    for rank in range(world_size):
        plans = plan_blocks(index, rank, world_size, block_bytes=block_bytes)
        largest_row = max(size // (shape[0] if shape else 1) for size, shape in zip(sizes, shapes, strict=True))
        share = sum(rows.num_bytes for plan in plans for rows in plan.rows)
        assert abs(share - sum(sizes) / world_size) <= largest_row + 1
        for plan in plans:
            assert plan.start == plan.rows[0].offset
            assert plan.stop == plan.rows[-1].offset + plan.rows[-1].num_bytes
            assert plan.stop - plan.start <= max(block_bytes, largest_row)
            for item in plan.rows:
                first = item.region.start[0] if item.region.start else 0
                rows.setdefault(item.tensor, []).append((first, item.region.shape[0] if item.region.shape else 1))
    for name, stored in index.items():
        position = 0
        for first, count in rows[name]:
            assert first == position
            position += count
        assert position == (stored.shape[0] if stored.shape else 1)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_an_engine_holds_what_is_on_disk(world_size: int, stored: torch.dtype, tmp_path: Path) -> None:
    save(tmp_path, {name: tensor.to(stored) for name, tensor in checkpoint(5).items()})
    parts = [Checkpoint(tmp_path, rank=rank, world_size=world_size, num_threads=2) for rank in range(world_size)]
    assert sum(part.read().num_bytes for part in parts) == sum(t.numel() for t in load_all(tmp_path)) * stored.itemsize
    fabric = MemoryFabric()
    engine = PlainEngine([MemoryTransport(fabric) for _ in range(2)])
    pipelines = [
        Pipeline(part.source, MemoryTransport(fabric), device="cpu", watermark_bytes=1 << 16) for part in parts
    ]
    plan = build_plan(
        [part.source.layout() for part in parts],
        [[engine_layout(rank) for rank in range(2)]],
        max_task_bytes=min(pipeline.max_task_bytes for pipeline in pipelines),
    )
    bindings = {(0, rank): receiver.begin(5, 1, plan.digest) for rank, receiver in enumerate(engine.receivers)}
    for rank, pipeline in enumerate(pipelines):
        pipeline.load(plan.tasks[rank])

    def publish(version: int) -> None:
        expected: list[dict[str, tuple[int, int]]] = [{}, {}]
        for pipeline in pipelines:
            pipeline.prepare(version)
            result = pipeline.run(version, bindings, {0: 5.0})
            assert result.report.errors == {}
            for (_, rank), sums in by_name(result.sums).items():
                for param, (count, total) in sums.items():
                    had = expected[rank].get(param, (0, 0))
                    expected[rank][param] = (had[0] + count, (had[1] + total) % 2**64)
        for rank, receiver in enumerate(engine.receivers):
            own = {name: expected[rank][name] for name in plan.expected[0, rank]}
            receiver.verify(version, version - 4, plan.digest, expected_of(own))
            receiver.commit(version, version - 4)
        assert engine.wrong_params(version) == []

    publish(5)
    save(tmp_path, {name: tensor.to(stored) for name, tensor in checkpoint(6).items()})
    for part in parts:
        part.refresh()
    for receiver in engine.receivers:
        receiver.begin(6, 2, plan.digest)
    publish(6)


def load_all(folder: Path) -> list[torch.Tensor]:
    return [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]


def test_what_is_held_is_the_files_bytes_also_where_a_tensor_is_shared(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(77, dtype=torch.int32).view(7, 11), "b": torch.tensor(3.5), "c": torch.zeros(0, 4)}
    save(tmp_path, tensors, num_files=1)
    seen = torch.zeros(7, 11, dtype=torch.int32)
    for rank in range(3):
        part = Checkpoint(tmp_path, rank=rank, world_size=3)
        part.read()
        for shard in part.source.layout().shards:
            if shard.tensor == "a":
                out = torch.empty(shard.region.shape, dtype=torch.int32)
                part.source.read("a", shard.region, out)
                seen[shard.region.start[0] : shard.region.stop[0]] += out
            elif shard.tensor == "b":
                out = torch.empty(())
                part.source.read("b", Region((), ()), out)
                assert out.item() == 3.5
    assert torch.equal(seen, tensors["a"])


def test_a_source_is_there_before_its_bytes_and_refuses_a_publish_until_all_are_read(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.arange(8.0), "b": torch.zeros(3)})
    part = Checkpoint(tmp_path)
    source = part.source
    assert len(source.layout().shards) == 2
    with pytest.raises(WeightSyncError, match="was not read yet"):
        source.begin(0)
    part.read()
    assert part.source is source
    source.begin(0)
    out = torch.empty(8)
    source.read("a", Region((0,), (8,)), out)
    assert out.tolist() == list(range(8))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        part.read()
    with pytest.raises(WeightSyncError, match="was not read whole"):
        source.begin(1)


def test_after_a_file_that_cannot_be_read_no_other_one_is(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.arange(8.0), "b": torch.zeros(3)})
    part = Checkpoint(tmp_path, num_threads=1)
    part.read()
    first = tmp_path / "model-00001-of-00002.safetensors"
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="was cut short while it was read"):
        part.read()
    assert part.num_bytes_read == 0


def test_neighbours_in_a_file_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has 100,000 small tensors, and a read of its own for each costs more than its bytes."""
    names = [f"layers.{number}" for number in range(100)]
    tensors = {name: torch.arange(64.0) + number for number, name in enumerate(names)}
    save(tmp_path, tensors)
    sizes: list[int] = []

    def read(path: Path, offset: int, out: torch.Tensor) -> None:
        sizes.append(out.numel())
        read_into(path, offset, out)

    read_into = safetensors_source._read_into
    monkeypatch.setattr(safetensors_source, "_read_into", read)
    part = Checkpoint(tmp_path)
    assert part.read().num_bytes == part.num_bytes_read == sum(sizes) == 100 * 64 * 4
    assert len(sizes) == 2, "one per file"
    other = tmp_path / "other"
    other.mkdir()
    save(other, {name: -values for name, values in tensors.items()}, num_files=3)
    part.refresh(other)
    part.source.begin(0)
    for name, values in tensors.items():
        out = torch.empty(64)
        part.source.read(name, Region((0,), (64,)), out)
        assert torch.equal(out, -values)


def test_another_model_cannot_refresh_and_a_vanished_file_is_named(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    for folder, width in ((first, 4), (other, 6)):
        folder.mkdir()
        save(folder, {"a": torch.zeros(8, width), "b": torch.zeros(3)})
    part = Checkpoint(first)
    part.read()
    with pytest.raises(ConfigError, match="register it anew"):
        part.refresh(other)
    (first / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks 1 of 2 shards"):
        part.refresh()
    with pytest.raises(ConfigError, match="cannot be read"):
        part.read()


def test_formats_that_cannot_cross_are_named(tmp_path: Path) -> None:
    save_file({"mask": torch.zeros(3, dtype=torch.bool)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="mask has format BOOL; formats that can be published: F32"):
        Checkpoint(tmp_path)
    assert set(read_index(tmp_path, "x")) == {"mask"}


def test_an_index_decides_which_file_holds_a_tensor_and_without_one_a_name_is_in_one_file(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"w": torch.ones(4)}, tmp_path / first)
    save_file({"w": torch.zeros(4), "v": torch.ones(2)}, tmp_path / second)
    with pytest.raises(ConfigError, match=f"w is in {first} and in {second}, and there is no {INDEX_NAME}"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": first, "v": second}}))
    part = Checkpoint(tmp_path)
    part.read()
    out = torch.empty(4)
    part.source.read("w", Region((0,), (4,)), out)
    assert out.tolist() == [1.0] * 4
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": first, "v": first}}))
    with pytest.raises(ConfigError, match=f"says that v is in {first}, which does not hold it"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index", ["[]", "[" * 10_000, '{"weight_map": 3}', '{"weight_map": {"w": 3}}', '{"weight_map": ["w"]}']
)
def test_an_index_of_another_kind_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(ConfigError, match=f"{INDEX_NAME} is not a safetensors index"):
        read_index(tmp_path, "x")


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([1], "has a list for a safetensors header"),
        ({"w": {"dtype": "F32", "shape": [1]}}, "w needs dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}}, "w needs dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "w needs dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": 4, "data_offsets": [0, 4]}}, "w needs dtype, shape and data_offsets"),
        ({"w": 7}, "w needs dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "w has 4 bytes"),
        ("[" * 10_000, "has no readable safetensors header"),
        ({"w": F32, "v": F32}, "w begins at byte 0 of the data, and what is before it ends at byte 4"),
        ({"w": F32, "v": F32 | {"data_offsets": [8, 12]}}, "v begins at byte 8 .* before it ends at byte 4"),
        ({"w": F32}, "has 4 bytes behind its last tensor"),
        ({"w": F32 | {"shape": [4], "data_offsets": [0, 16]}}, "is cut short"),
    ],
)
def test_a_header_that_describes_no_tensor_is_named(header: object, message: str, tmp_path: Path) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match=message):
        read_index(tmp_path, "x")
