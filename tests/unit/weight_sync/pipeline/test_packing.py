"""How a schedule is cut into loads, and where a load's packets are in a slot."""

import pytest
from cases.pipeline_world import HASH_BYTES, SMALL_WATERMARK, World

from slipstream.weight_sync.plan.budget import NUM_SLOTS, SLOT_ALIGNMENT_BYTES


@pytest.mark.parametrize("watermark_bytes", [SMALL_WATERMARK, HASH_BYTES + 1024])
def test_packets_begin_at_aligned_places_and_share_no_byte_and_fit_their_slot(watermark_bytes: int) -> None:
    pipeline = World(watermark_bytes=watermark_bytes).pipeline
    assert pipeline._slots is not None
    slot_bytes = pipeline._slots.num_bytes // NUM_SLOTS
    sizes = {packet.tasks[0].num_bytes for packets in pipeline.loads for packet in packets[:-1]}
    assert any(size % SLOT_ALIGNMENT_BYTES for size in sizes), "one behind which a place is left"
    for packets in pipeline.loads:
        starts = [packet.offset_bytes for packet in packets]
        stops = [packet.offset_bytes + packet.tasks[0].num_bytes for packet in packets]
        assert not any(start % SLOT_ALIGNMENT_BYTES for start in starts)
        assert all(stop <= start for stop, start in zip(stops, [*starts[1:], slot_bytes], strict=True))
