"""Changes that are found by comparing: between checkpoints on disk, and between updates of any tensors."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY, EndpointThread
from fakes.ranked_engine import REPACKED, MirrorEngine
from safetensors.torch import save_file

from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync import api
from slipstream.weight_sync.api import Sender, register_checkpoint, register_tensors
from slipstream.weight_sync.disk import kept_source
from slipstream.weight_sync.disk.kept_source import KeptSource
from slipstream.weight_sync.layout import Region
from slipstream.weight_sync.pipeline.packing import PackedRead
from slipstream.weight_sync.replica.receiver import Receiver

SHAPES = {"embed": (300, 16), REPACKED: (64, 64), "up": (200, 64), "down": (64, 200), "norm": (40,), "bias": (64,)}
"""bias is float32."""
CONFIG = WeightSyncConfig(watermark_bytes=1 << 20, delta_bytes=1 << 14)
NUM_BYTES = sum(torch.Size(shape).numel() * (4 if name == "bias" else 2) for name, shape in SHAPES.items())


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: tensor if name == "bias" else tensor.bfloat16() for name, tensor in drawn.items()}


def step(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Change two elements of a hundred."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        is_hit = torch.rand(tensor.shape, generator=generator) < 0.02
        tensor[is_hit] += 1


def save(tensors: dict[str, torch.Tensor], folder: Path, num_files: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(num_files):
        names = sorted(tensors)[number::num_files]
        save_file({name: tensors[name] for name in names}, folder / f"{number}.safetensors")


class Ends:
    """A sender of a source, and engines."""

    def __init__(self, source, num_engines: int = 1, **options: int) -> None:
        self.config = replace(CONFIG, **options)
        self.fabric = MemoryFabric()
        self.links = [MemoryTransport(self.fabric) for _ in range(num_engines)]
        metas = source.layout().tensors
        self.engines = [MirrorEngine(metas, link, self.config.delta_bytes) for link in self.links]
        self.endpoints = [EndpointThread(engine) for engine in self.engines]
        self.sender = self.make_sender(source)

    def make_sender(self, source) -> Sender:
        return Sender(source, [one.address for one in self.endpoints], key=KEY, device="cpu", config=self.config)

    def hold(self, folder: Path) -> list[bool]:
        return [engine.holds(folder) for engine in self.engines]

    def close(self) -> None:
        self.sender.close()
        for endpoint in self.endpoints:
            endpoint.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []
    monkeypatch.setattr(api, "MooncakeTransport", lambda *_, **__: MemoryTransport(made_fabric(made)))

    def make_ends(*args, **options: int) -> Ends:
        ends = object.__new__(Ends)
        made.append(ends)
        ends.__init__(*args, **options)
        return ends

    yield make_ends
    for ends in made:
        ends.close()


def made_fabric(made: list[Ends]) -> MemoryFabric:
    return made[-1].fabric


@pytest.mark.parametrize("watermark_bytes", [1 << 20, 200_000])
def test_updates_of_tensors_in_memory_send_what_changed(make, watermark_bytes, tmp_path) -> None:
    tensors = values(0)
    ends = make(register_tensors(tensors), 2, watermark_bytes=watermark_bytes)
    sent: list[int] = []
    for version in range(4):
        report = ends.sender.update(version)
        save(tensors, tmp_path)
        assert report.num_committed == 2 and ends.hold(tmp_path) == [True, True], report
        assert report.peak_bytes <= watermark_bytes
        sent.append(report.num_bytes)
        step(tensors, version)
    whole_anyway = 2 * sum(torch.Size(SHAPES[n]).numel() * s for n, s in ((REPACKED, 2), ("bias", 4), ("norm", 2)))
    assert sent[0] == 2 * NUM_BYTES
    assert all(whole_anyway < one < whole_anyway + 0.2 * sent[0] for one in sent[1:]), sent


@pytest.mark.parametrize(("num_publishes", "changed"), [(1, [0]), (2, [0, 1, 2])])
def test_only_what_the_publish_before_packed_is_compared_with(num_publishes: int, changed: list[int]) -> None:
    """An element may have changed, been sent, and changed back since an earlier one."""
    tensors = {"norm": torch.arange(3).bfloat16()}
    source = KeptSource(register_tensors(tensors), CONFIG.watermark_bytes, "cpu")
    read = PackedRead("norm", Region((0,), (3,)), (0,), "bfloat16", 0)
    slot, marks = torch.empty(256, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    fill = source.compile_marked_reads([read])(slot, marks)
    fill()
    for _ in range(num_publishes):
        source.keep()
    tensors["norm"][0] = 7
    fill()
    assert marks[:3].nonzero().flatten().tolist() == changed


def test_memory_for_what_is_kept_is_there_before_a_publish(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking takes a GPU's host seconds, in which engines would stand still."""
    taken: list[int] = []
    host_bytes = kept_source.host_bytes
    monkeypatch.setattr(kept_source, "host_bytes", lambda n, **how: (taken.append(n), host_bytes(n, **how))[1])
    ends = make(register_tensors(values(0)))
    assert NUM_BYTES <= sum(taken) < 1.2 * NUM_BYTES
    before = len(taken)
    assert ends.sender.update(0).num_committed == ends.sender.update(1).num_committed == 1
    assert len(taken) == before


@pytest.mark.parametrize("num_files", [1, 3])
def test_between_two_checkpoints_engines_that_hold_the_first_get_what_differs(make, num_files, tmp_path) -> None:
    """The second sender knows nothing of the first. One engine holds the first checkpoint, the other one does not."""
    tensors = values(0)
    save(tensors, tmp_path / "old")
    step(tensors, 1)
    save(tensors, tmp_path / "new", num_files)
    handle = register_checkpoint(tmp_path / "old")
    ends = make(handle.source, 2)
    assert ends.sender.update(0).num_committed == 2
    ends.engines[1].params[0]["up"][7, 7] += 1
    ends.engines[1].receivers[0]._holds = None  # as of an engine that was attached anew
    ends.engines[0].receivers[0]._holds = None
    ends.sender.close()
    ends.sender = ends.make_sender(handle.source)
    ends.sender.note_base()
    handle.refresh(tmp_path / "new")
    report = ends.sender.update(1)
    assert report.num_committed == 2 and ends.hold(tmp_path / "new") == [True, True]
    assert NUM_BYTES < report.num_bytes < 1.5 * NUM_BYTES
    assert report.num_takers == 1
    assert report.changed_fraction == pytest.approx(0.02, abs=0.004)


def test_a_publish_that_does_not_end_leaves_nothing_that_is_compared_with(make, monkeypatch, tmp_path) -> None:
    tensors = values(0)
    ends = make(register_tensors(tensors))
    ends.sender.update(0)
    step(tensors, 1)
    with monkeypatch.context() as patch:

        def dies(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("slipstream.weight_sync.publish.transaction.Transaction.finish", dies)
        with pytest.raises(KeyboardInterrupt):
            ends.sender.update(1)
    step(tensors, 2)
    for version, is_whole in ((2, True), (3, False)):
        report = ends.sender.update(version)
        save(tensors, tmp_path)
        assert report.num_committed == 1 and ends.hold(tmp_path) == [True]
        assert (report.num_bytes == NUM_BYTES) == is_whole
        step(tensors, 3)


@pytest.mark.parametrize("is_put_in", [False, True])
def test_after_a_push_that_died_an_engine_proves_the_base_anew_if_nothing_was_put_in(make, is_put_in, tmp_path) -> None:
    tensors = values(0)
    save(tensors, tmp_path / "old")
    step(tensors, 1)
    save(tensors, tmp_path / "new")
    handle = register_checkpoint(tmp_path / "old")
    ends = make(handle.source)
    assert ends.sender.update(0).num_committed == 1
    for stage in ("dies", "comes again"):
        ends.sender.close()
        ends.sender = ends.make_sender(handle.source)
        handle.refresh(tmp_path / "old")
        ends.sender.note_base()
        handle.refresh(tmp_path / "new")
        if stage == "dies":
            ends.engines[0].fail_on["commit" if is_put_in else "verify"] = RuntimeError("the engine died")
            assert ends.sender.update(1).num_committed == 0
            old = ends.engines[0].receivers[0]
            old.close_landing()
            ends.links[0].unregister([old._params[param.name] for param in old.sent_params])
            ends.engines[0].receivers[0] = Receiver(
                old._params, old.layout, old.transport, repack=old._repack, recompute=old._recompute,
                landing_bytes=ends.config.delta_bytes,
            )  # fmt: skip
    report = ends.sender.update(2)
    assert report.num_committed == 1 and ends.hold(tmp_path / "new") == [True]
    assert report.num_takers == (0 if is_put_in else 1)
