"""The weight sync on its own: tensors or a folder of safetensors into engines, over real Mooncake and ZMQ."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from fakes.publish import EMBED, KEY, NUM_ENGINE_RANKS, EndpointThread, PlainEngine, checkpoint, committed
from safetensors.torch import save_file

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.api import Part, Sender, register_checkpoint, register_tensors, update
from slipstream.weight_sync.errors import WeightSyncError
from slipstream.weight_sync.transport.mooncake import MooncakeTransport

CONFIG = WeightSyncConfig(watermark_bytes=1 << 16)


Sends = Callable[..., Sender]


def replica() -> EndpointThread:
    return EndpointThread(PlainEngine([MooncakeTransport(timeout_s=CONFIG.timeout_s) for _ in range(NUM_ENGINE_RANKS)]))


@pytest.fixture
def replicas() -> Iterator[list[EndpointThread]]:
    """Engines with plain tensors that a publisher can reach."""
    made = [replica(), replica()]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def sends(replicas: list[EndpointThread]) -> Iterator[Sends]:
    """Makes a sender of tensors to all of them."""
    with ExitStack() as ends:

        def make(tensors: dict[str, torch.Tensor]) -> Sender:
            addresses = [one.address for one in replicas]
            sender = Sender(register_tensors(tensors), addresses, key=KEY, device="cpu", config=CONFIG)
            ends.callback(sender.close)
            return sender

        yield make


def overwrite(tensors: dict[str, torch.Tensor], version: int) -> None:
    for name, tensor in checkpoint(version).items():
        tensors[name].copy_(tensor)


def test_a_dict_of_tensors_is_sent_as_it_is_at_each_update(replicas: list[EndpointThread], sends: Sends) -> None:
    tensors, calls = checkpoint(3), list[str]()
    sender = sends(tensors)
    for version in (3, 4):
        overwrite(tensors, version)
        assert sender.update(version, request_hook=calls.append).num_committed == 2
        assert [one.handler.wrong_params(version) for one in replicas] == [[], []]
    assert calls == ["start", "finish"] * 2
    assert sender.link == "tcp"


def test_parts_of_tensors_and_another_format_make_the_same_engine(replicas: list[EndpointThread]) -> None:
    tensors = {name: tensor.float() for name, tensor in checkpoint(1).items()}
    whole = tensors.pop(EMBED)
    parts = {EMBED: Part(whole[:], (0, 0), tuple(whole.shape))}
    report = update(register_tensors({**tensors, **parts}), [replicas[0].address], key=KEY, device="cpu", config=CONFIG)
    assert report.num_committed == 1
    assert replicas[0].handler.wrong_params(0) == replicas[0].handler.wrong_params(2) != []
    assert replicas[0].handler.wrong_params(1) == []


def test_a_checkpoint_on_disk_is_registered_sent_refreshed_and_sent_again(
    replicas: list[EndpointThread], tmp_path: Path
) -> None:
    save_file(checkpoint(0), tmp_path / "model.safetensors")
    handle = register_checkpoint(tmp_path)
    assert update(handle, [replicas[0].address], key=KEY, device="cpu", config=CONFIG).num_committed == 1
    assert replicas[0].handler.wrong_params(0) == []
    save_file(checkpoint(1), tmp_path / "model.safetensors")
    handle.refresh()
    assert update(handle, [replicas[0].address], key=KEY, version=1, device="cpu", config=CONFIG).num_committed == 1
    assert replicas[0].handler.wrong_params(1) == []


def test_a_hook_that_fails_stops_the_update_and_finish_needs_every_engine(
    replicas: list[EndpointThread], sends: Sends
) -> None:
    calls: list[str] = []

    def refuses(event: str) -> None:
        raise RuntimeError("no such server")

    sender = sends(checkpoint(0))
    with pytest.raises(WeightSyncError, match=r"request_hook\('start'\) failed: RuntimeError: no such server"):
        sender.update(0, request_hook=refuses)
    assert "begin" not in replicas[0].handler.calls
    replicas[1].handler.fail_on["verify"] = RuntimeError("broken")
    assert committed(sender.update(0, request_hook=calls.append)) == [True, False]
    assert calls == ["start"]


def test_a_hook_an_engine_costs_that_engine_alone(replicas: list[EndpointThread], sends: Sends) -> None:
    calls: list[str] = []

    def hook(name: str, fails: str = "") -> Callable[[str], None]:
        def call(event: str) -> None:
            calls.append(f"{event} {name}")
            if event == fails:
                raise RuntimeError(f"{name} cannot {event}")

        return call

    sender = sends(checkpoint(0))
    for fails, called in (
        ("finish", ["start a", "start b", "finish a", "finish b"]),
        ("start", ["start a", "start b", "finish b"]),
    ):
        calls.clear()
        report = sender.update(0, request_hook=[hook("a", fails), hook("b")])
        assert (calls, committed(report)) == (called, [False, True])
        assert report.replicas[0].error == f"request_hook('{fails}') failed: RuntimeError: a cannot {fails}"
    calls.clear()
    both = hook("both")
    replicas[1].handler.fail_on["verify"] = RuntimeError("broken")
    assert sender.update(0, request_hook=[both, both]).num_committed == 1
    assert calls == ["start both"]  # ranks of one engine: it serves one version on all of them, or none
    with pytest.raises(WeightSyncError, match="1 request hooks for 2 engines"):
        sender.update(0, request_hook=[both])


def test_an_engine_is_left_out_while_it_is_down_and_met_again_where_it_is_then(
    replicas: list[EndpointThread], sends: Sends
) -> None:
    tensors, calls = checkpoint(1), list[str]()
    sender = sends(tensors)
    assert sender.update(1).num_committed == 2
    replicas.pop().close()
    report = sender.update(1, exclude=[1], request_hook=calls.append)
    assert [(r.committed, r.error) for r in report.replicas] == [(True, None), (False, "excluded by the caller")]
    assert calls == ["start", "finish"]
    replicas.append(replica())
    sender.reconnect(1, replicas[1].address)
    overwrite(tensors, 2)
    assert sender.update(2).num_committed == 2
    assert [one.handler.wrong_params(2) for one in replicas] == [[], []]
    with pytest.raises(WeightSyncError, match=r"excludes replicas \[2\]; there are 2"):
        sender.update(2, exclude=[2])


def test_tensors_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^norm is complex64"):
        register_tensors({"norm": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ConfigError, match=r"w is not contiguous"):
        register_tensors({"w": torch.zeros(2, 3).t()})
    with pytest.raises(ConfigError, match=r"w: \(3, 2\) at \(2, 0\) is not inside \(4, 2\)"):
        register_tensors({"w": Part(torch.zeros(3, 2), (2, 0), (4, 2))})
