"""Promises of weight_sync/replica/landing.py: a row that is out of bounds is refused, and nothing is written."""

import numpy as np
import pytest
import torch
from fakes.memory_transport import MemoryFabric, MemoryTransport

from slipstream.weight_sync.changes import Chunk, Packer, stream_bytes
from slipstream.weight_sync.errors import ProtocolError, WatermarkError
from slipstream.weight_sync.layout import DestLayout, Fill, Param, PostLoad
from slipstream.weight_sync.replica.landing import LandingZone

LAYOUT = DestLayout(
    0,
    (
        Param("absorbed", (4,), "bfloat16", PostLoad.derived), Param("embed", (16, 8), "bfloat16"),
        Param("packed", (8, 8), "bfloat16", PostLoad.repack), Param("bias", (64,), "float32"),
        Param("fp8", (16, 16), "float8_e4m3fn"), Param("odd", (5, 13), "float8_e4m3fn"),
    ),
    (),
    (Fill("embed", 0, 8), Fill("embed", 64, 16)),
)  # fmt: skip
"""Numbered without the derived one: embed 0, of whose 256 bytes 0 to 16 and 128 to 160 are never sent, packed 1, bias
2, fp8 3, odd 4."""
ZONE_BYTES = 256


@pytest.fixture
def params() -> dict[str, torch.Tensor]:
    return {p.name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for p in LAYOUT.params}


@pytest.fixture
def zone(params: dict[str, torch.Tensor]) -> LandingZone:
    """With the stream of two elements of 64 bytes at 16: the second is 5, the last is 7."""
    zone = LandingZone(ZONE_BYTES, LAYOUT, params, MemoryTransport(MemoryFabric()))
    values = torch.zeros(32, dtype=torch.int16)
    values[1], values[31] = 5, 7
    stream = zone._zone[4 : 4 + stream_bytes(64, 2) // 4]
    Packer([Chunk(values, (values != 0).to(torch.uint8), stream)]).pack_to(torch.zeros(1, dtype=torch.int32))
    return zone


@pytest.mark.parametrize("offset", [16, 32, 64, 160, 192])
def test_elements_go_to_their_places_between_any_two_fills(zone, params, offset):
    zone.apply(np.array([[0, offset, 64, 16, 2], [3, offset, 64, 16, 2]], "<i8").tobytes())
    for name in ("embed", "fp8"):
        bits, first = params[name].view(-1).view(torch.int16), offset // 2
        assert bits.nonzero().flatten().tolist() == [first + 1, first + 31]
        assert bits[[first + 1, first + 31]].tolist() == [5, 7]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([5, 0, 64, 16, 2], "no parameter 5"),
        ([-1, 0, 64, 16, 2], "no parameter -1"),
        ([0, 96, 64, 16, 2], "bytes 96 to 160 cannot be written"),
        ([0, 0, 64, 16, 2], "bytes 0 to 64 cannot be written"),
        ([0, 144, 64, 16, 2], "bytes 144 to 208 cannot be written"),
        ([0, 224, 64, 16, 2], "bytes 224 to 288 cannot be written"),
        ([0, -2, 64, 16, 2], "bytes -2 to 62 cannot be written"),
        ([0, 31, 64, 16, 2], "bytes 31 to 95 cannot be written"),
        ([0, 32, 0, 16, 2], "cannot be written"),
        ([0, 32, 65, 16, 2], "bytes 32 to 97 cannot be written"),
        ([0, 32, 1 << 40, 16, 2], "cannot be written"),
        ([1, 0, 64, 16, 2], "packed in bytes 0 to 64 cannot be written"),
        ([2, 0, 64, 16, 2], "bias in bytes 0 to 64 cannot be written"),
        ([4, 0, 64, 16, 2], "odd in bytes 0 to 64 cannot be written"),
        ([0, 32, 64, -16, 2], "not in a zone of 256 bytes"),
        ([0, 32, 64, 18, 2], "not in a zone"),
        ([0, 32, 64, 244, 2], "not in a zone"),
        ([0, 32, 64, 16, -1], "not in a zone"),
        ([0, 32, 64, 16, 1 << 40], "not in a zone"),
        ([0, 32, 64, 16, 1], "not as many as was said; nothing was written"),
        ([0, 64, 32, 16, 2], "embed from byte 64 name elements outside them"),
    ],
)
def test_a_row_out_of_bounds_is_refused_before_anything_is_written(zone, params, row, message):
    right = [0, 32, 64, 16, 2]
    with pytest.raises(ProtocolError, match=message):
        zone.apply(np.array([right, row], "<i8").tobytes())
    assert not any(tensor.view(torch.uint8).any() for tensor in params.values())


def test_rows_that_are_cut_are_refused(zone):
    with pytest.raises(ProtocolError, match="39 bytes of changes are not rows of 40"):
        zone.apply(b"0" * 39)
    zone.apply(b"")


def test_a_zone_without_room_names_the_options(params):
    with pytest.raises(WatermarkError, match=r"no room for weight_sync.delta_bytes=\d+ .*rollout.kv_cache_bytes"):
        LandingZone(1 << 60, LAYOUT, params, MemoryTransport(MemoryFabric()))
