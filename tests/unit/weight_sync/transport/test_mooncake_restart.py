"""An engine that does not start again: the link is down, says so, and heals with its next use. Mooncake is a fake."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.conf.schema import TransportKind
from slipstream.weight_sync.errors import LinkMismatch, TransferFailed, TransportError
from slipstream.weight_sync.transport import mooncake
from slipstream.weight_sync.transport.mooncake import NUM_TRIES, MooncakeTransport, engine_module


class FakeMooncake:
    """Engines that start, register and transfer as they are told to; each takes another port."""

    def __init__(self) -> None:
        self.start_codes: list[int] = []
        """What the next starts return; 0 when there are none."""
        self.register_codes: list[int] = []
        self.unregister_codes: list[int] = []
        self.transfer_codes: list[int] = []
        self.num_started = 0
        self.topology = "{}"
        self.registered: list[set[int]] = []
        """Addresses, by engine that started."""

    def TransferEngine(self) -> SimpleNamespace:
        known: set[int] = set()

        def initialize(*_: str) -> int:
            code = self.start_codes.pop(0) if self.start_codes else 0
            if code == 0:
                self.num_started += 1
                self.registered.append(known)
            return code

        def register(addresses: list[int], sizes: list[int]) -> int:
            code = self.register_codes.pop(0) if self.register_codes else 0
            known.update(addresses if code == 0 else ())
            return code

        def unregister(addresses: list[int]) -> int:
            code = self.unregister_codes.pop(0) if self.unregister_codes else 0
            known.difference_update(addresses if code == 0 else ())
            return code

        def transfer(*_: object) -> int:
            return self.transfer_codes.pop(0) if self.transfer_codes else 0

        return SimpleNamespace(
            initialize=initialize,
            get_rpc_port=lambda: 15000 + self.num_started,
            get_local_topology=lambda: self.topology,
            batch_register_memory=register,
            batch_unregister_memory=unregister,
            batch_transfer_sync_write=transfer,
            batch_transfer_sync_read=transfer,
        )


@pytest.fixture
def fake() -> Iterator[FakeMooncake]:
    made = FakeMooncake()
    environment = {name: value for name, value in os.environ.items() if name.startswith("MC_")}
    yield made
    for name in [name for name in os.environ if name.startswith("MC_")]:
        del os.environ[name]
    os.environ.update(environment)


def write(transport: MooncakeTransport, data: torch.Tensor, session: str = "peer:1") -> None:
    transport.write(session, [data.data_ptr()], [1 << 40], [data.numel()], timeout_s=5.0)


def link(fake: FakeMooncake, down_s: float = 0.0) -> MooncakeTransport:
    return MooncakeTransport(TransportKind.tcp, retry_s=0.0, down_s=down_s, module=fake)


def linked(fake: FakeMooncake, down_s: float = 0.0) -> tuple[MooncakeTransport, torch.Tensor]:
    """A link whose session with peer:1 has failed."""
    transport, data = link(fake, down_s), torch.zeros(64, dtype=torch.uint8)
    transport.register([data])
    fake.transfer_codes = [-1]
    with pytest.raises(TransferFailed, match="code -1"):
        write(transport, data)
    return transport, data


@pytest.mark.parametrize("asked", ["auto", "rdma"])
def test_rdma_without_a_device_that_works_is_refused_by_the_option_as_it_was_given(
    fake: FakeMooncake, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(mooncake, "has_hca", lambda: True)
    fake.topology = '{"cpu:0": [[], []]}'
    with pytest.raises(LinkMismatch, match=rf"^weight_sync\.transport={asked}: .* choose weight_sync\.transport=tcp$"):
        MooncakeTransport(TransportKind(asked), module=fake)
    fake.topology = '{"cpu:0": [[], ["mlx5_0"]]}'
    assert MooncakeTransport(TransportKind(asked), module=fake).link == "rdma"


def test_a_port_that_is_taken_is_tried_again(fake: FakeMooncake) -> None:
    fake.start_codes = [-1, -1, 0]
    assert link(fake).session == "127.0.0.1:15001"
    fake.start_codes = [-1] * NUM_TRIES
    with pytest.raises(TransferFailed, match="did not start"):
        link(fake)


@pytest.mark.parametrize("what", ["start", "register"])
def test_a_restart_that_fails_is_tried_again_by_reset_and_forgets_nothing(fake: FakeMooncake, what: str) -> None:
    transport, data = linked(fake)
    for _ in range(2):
        fake.start_codes, fake.register_codes = ([-1] * 3, []) if what == "start" else ([], [-7])
        with pytest.raises(TransportError, match=r"did not start|registering 1 ranges"):
            transport.reset("peer:1")
    with pytest.raises(TransferFailed, match="reset the session first"):
        write(transport, data)
    transport.reset("peer:1")
    write(transport, data)
    assert fake.registered[-1] == {data.data_ptr()}


def test_a_link_that_is_down_is_a_transport_error_until_a_transfer_starts_it(fake: FakeMooncake) -> None:
    transport, data = linked(fake)
    fake.start_codes = [-1] * 9
    with pytest.raises(TransportError):
        transport.reset("peer:1")
    with pytest.raises(TransportError, match="did not start"):
        write(transport, data, "peer:2")
    with pytest.raises(TransportError, match="did not start"):
        assert transport.session
    before = fake.num_started
    write(transport, data, "peer:2")
    assert fake.num_started == before + 1
    assert fake.registered[-1] == {data.data_ptr()}
    write(transport, data)  # what had failed went with the old engine


def test_a_link_that_went_down_a_moment_ago_is_not_tried_by_everyone(fake: FakeMooncake) -> None:
    transport, data = linked(fake, down_s=60.0)
    fake.start_codes = [-1] * 3
    with pytest.raises(TransportError):
        transport.reset("peer:1")
    with pytest.raises(TransferFailed, match=r"link is down.*did not start"):
        write(transport, data, "peer:2")
    transport.renew()
    write(transport, data, "peer:2")


def test_renew_that_failed_names_no_session_until_one_is_there(fake: FakeMooncake) -> None:
    transport, data = linked(fake)
    old = transport.session
    fake.start_codes = [-1] * 3
    with pytest.raises(TransportError):
        transport.renew()
    assert transport.session != old
    assert fake.registered[-1] == {data.data_ptr()}


@pytest.mark.parametrize("is_down", [True, False])
def test_memory_that_is_freed_is_not_registered_again_whether_the_link_was_down_or_refused_to_forget_it(
    fake: FakeMooncake, is_down: bool
) -> None:
    transport, data = linked(fake)
    other = torch.zeros(64, dtype=torch.uint8)
    transport.register([other])
    if is_down:
        fake.start_codes = [-1] * 3
        with pytest.raises(TransportError):
            transport.reset("peer:1")
    else:
        fake.unregister_codes = [-1]
    transport.unregister([other])
    transport.reset("peer:1")
    assert fake.registered[-1] == {data.data_ptr()}
    with pytest.raises(TransferFailed, match="not in registered memory"):
        write(transport, other)


def test_a_closed_link_stays_closed(fake: FakeMooncake) -> None:
    transport, data = linked(fake)
    transport.close()
    before = fake.num_started
    transport.reset("peer:1")
    with pytest.raises(TransferFailed, match="closed"):
        write(transport, data, "peer:2")
    assert fake.num_started == before


@pytest.mark.parametrize(
    ("name", "asked", "found"),
    [
        ("MC_LOG_LEVEL", None, "ERROR"),
        ("MC_LOG_LEVEL", "INFO", "INFO"),
        ("MC_LOG_DIR", "{tmp}", "{tmp}"),
        ("MC_LOG_DIR", "{tmp}/no such", None),
        ("MC_LOG_DIR", "/proc", None),
        ("MC_LOG_DIR", "", None),
    ],
)
def test_mooncake_logs_errors_alone_unless_asked_and_where_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, asked: str | None, found: str | None
) -> None:
    """It reads the variables when it is loaded, and never again."""
    monkeypatch.setenv(name, (asked or "").format(tmp=tmp_path))
    if asked is None:
        monkeypatch.delenv(name)
    loaded = SimpleNamespace(engine=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mooncake", loaded)
    monkeypatch.setitem(sys.modules, "mooncake.engine", loaded.engine)
    assert engine_module() is loaded.engine
    assert os.environ.get(name) == (found and found.format(tmp=tmp_path))
