"""What a rank sends where: the base before adapters, and what is kept of weights that nothing else knows."""

from collections.abc import Callable

import pytest
from cases.delta_world import World
from cases.rank_helpers import SYNC_KEY, make_rank
from fakes import publish
from fakes.memory_transport import Fault, MemoryFabric, MemoryTransport

from slipstream.conf.schema import SyncMode, TrainMode, WeightSyncConfig
from slipstream.weight_sync.disk.kept_source import KeptSource
from slipstream.weight_sync.errors import ReplicaError


def test_an_engine_that_did_not_take_the_base_is_named_and_gets_no_adapters() -> None:
    fabric = MemoryFabric()
    rank = make_rank(weight_sync=WeightSyncConfig(mode=SyncMode.adapter, watermark_bytes=1 << 16))
    delivery = rank.delivery
    delivery.source, delivery.base_source = (publish.DictSource(0, num_ranks=1) for _ in range(2))  # type: ignore[assignment]
    links = [[MemoryTransport(fabric) for _ in range(2)] for _ in range(4)]
    engines = [publish.PlainEngine(of_engine) for of_engine in links]
    ends = [publish.EndpointThread(engine, SYNC_KEY) for engine in engines]
    bases, slots = ([end.address for end in part] for part in (ends[:2], ends[2:]))
    for link in links[1]:
        fabric.inject(link.session, Fault(refuse=True))
    try:
        with pytest.raises(ReplicaError, match=f"^the base weights did not reach every engine: {bases[1]}: ") as error:
            delivery.connect(bases, MemoryTransport(fabric), slots)
        assert bases[0] not in str(error.value)
        assert engines[0].wrong_params(0) == [] != engines[1].wrong_params(0), "the other one has it"
    finally:
        rank.shutdown()
        for end in ends:
            end.close()


@pytest.mark.parametrize(("mode", "is_kept"), [(TrainMode.lora, False), (TrainMode.full, True)])
def test_what_was_sent_is_kept_in_host_memory_only_where_it_cannot_be_computed_again(
    make_world: Callable[..., World], mode: TrainMode, is_kept: bool
) -> None:
    """A copy of the model's bytes, which a rank of LoRA has no room for."""
    world = make_world(mode=mode)
    world.publish()
    publisher = world.rank.delivery._publisher
    assert publisher is not None and isinstance(publisher._source, KeptSource) == is_kept
