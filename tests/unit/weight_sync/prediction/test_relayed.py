"""Promises of weight_sync/prediction/predict.py: who is written, and what the reads inside the nodes take."""

import pytest

from slipstream.weight_sync.layout import DestLayout, Load, Param, Region, SourceLayout, SourceShard, TensorMeta
from slipstream.weight_sync.plan.budget import Staging
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.prediction.links import LinkRates, Placement, place
from slipstream.weight_sync.prediction.predict import (
    Prediction,
    neighbours,
    num_rounds,
    predict,
    relay_s,
    written_alone,
)

STAGING = Staging(watermark_bytes=1 << 22)
WIRE = LinkRates(
    nic_bytes_s=1e6, nvlink_bytes_s=8e6, hbm_bytes_s=1e15, write_latency_s=0, op_s=0, load_launch_s=0, hand_over_s=0,
    source_begin_s=0, replay_s=0, begin_s=0.5, commit_s=0.25, barrier_s=0,
)  # fmt: skip
"""The wire, and a pause that can be told apart: NVLink is eight times a NIC."""
NUM_BYTES = 1 << 20


def engine(tp_size: int) -> list[DestLayout]:
    rows = NUM_BYTES // tp_size
    return [
        DestLayout(
            rank, (Param("w", (rows,), "uint8"),), (Load("w", Region((rank * rows,), (rows,)), (0,), "w", 0, (1,)),)
        )
        for rank in range(tp_size)
    ]


def sources(num_ranks: int) -> list[SourceLayout]:
    meta, rows = TensorMeta("w", (NUM_BYTES,), "uint8"), NUM_BYTES // num_ranks
    return [SourceLayout(i, (meta,), (SourceShard("w", Region((i * rows,), (rows,))),)) for i in range(num_ranks)]


def both(num_sources: int, num_replicas: int, tp_size: int) -> tuple[Prediction, Prediction, float]:
    """The publish to all, the publish to the written ones, and the reads."""
    layouts = engine(tp_size)

    def plan(replicas: int):
        return build_plan(sources(num_sources), [layouts] * replicas, max_task_bytes=STAGING.max_task_bytes)

    everyone = plan(num_replicas)
    placement = place(list(everyone.tasks), list(everyone.expected), 8)
    readers = neighbours(placement)
    few = plan(len(readers))
    return (
        predict(everyone, placement, WIRE, STAGING, verify_hashes=False),
        predict(few, written_alone(placement, list(readers)), WIRE, STAGING, verify_hashes=False),
        relay_s(readers, layouts, WIRE, verify_hashes=False),
    )


def test_one_replica_of_every_node_is_written():
    everyone = place(range(8), [(r, rank) for r in range(16) for rank in range(4)], 8)
    assert neighbours(everyone) == {r: [r + 1] for r in range(0, 16, 2)}, "8 nodes of 2 x TP4"
    spanning = place(range(8), [(r, rank) for r in range(3) for rank in range(16)], 8)
    assert neighbours(spanning) == {0: [], 1: [], 2: []}, "TP16 on nodes of 8 has no neighbour to read from"
    halves = {(replica, rank): 8 * (1 + rank // 4) + 4 * replica + rank % 4 for replica in (0, 1) for rank in range(8)}
    assert neighbours(Placement(8, {0: 0}, halves)) == {0: [], 1: []}, "both on nodes 1 and 2"
    mixed = place(range(4), [(r, rank) for r in range(5) for rank in range(2)], 8)
    assert neighbours(mixed) == {0: [1], 2: [3, 4]}, "the trainer's own node has engines too"


def test_those_that_are_written_keep_their_gpus():
    everyone = place(range(8), [(r, rank) for r in range(4) for rank in range(4)], 8)
    few = written_alone(everyone, [0, 2])
    assert few.engine_gpus == {(0, rank): 8 + rank for rank in range(4)} | {(1, rank): 16 + rank for rank in range(4)}


@pytest.mark.parametrize(("readers", "rounds"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_holders_double_every_round(readers: int, rounds: int):
    assert num_rounds(readers) == rounds


def test_a_trainer_with_few_nics_is_spared_half_its_bytes():
    # 8 senders, 16 replicas: 16 MiB / 8 = 2 MiB a NIC; relayed 1 MiB, and then a quarter of 1 MiB over NVLink.
    direct, written, reads_s = both(8, 16, 4)
    assert direct.sender_floor_s == pytest.approx(16 * NUM_BYTES / 8 / 1e6, rel=0.01)
    assert written.sender_floor_s == pytest.approx(direct.sender_floor_s / 2, rel=0.01)
    assert reads_s == pytest.approx(0.75 + NUM_BYTES / 4 / 8e6)
    assert written.total_s + reads_s < direct.total_s


def test_a_trainer_with_as_many_nics_as_the_engines_gains_nothing():
    # 64 senders, 64 engine ranks: every NIC, of either side, carries 1/4 MiB, with or without neighbours that read.
    direct, written, reads_s = both(64, 16, 4)
    assert direct.receiver_floor_s == pytest.approx(NUM_BYTES / 4 / 1e6, rel=0.01)
    assert written.receiver_floor_s == pytest.approx(direct.receiver_floor_s, rel=0.01)
    assert written.total_s + reads_s > direct.total_s


def test_hashes_are_a_pass_over_what_was_read():
    slow = LinkRates(hbm_bytes_s=1e6)
    readers = {0: [1]}
    cost_s = relay_s(readers, engine(4), slow, verify_hashes=True) - relay_s(
        readers, engine(4), slow, verify_hashes=False
    )
    assert cost_s == pytest.approx(NUM_BYTES / 4 / 1e6)
    assert relay_s({0: [], 1: []}, engine(4), slow, verify_hashes=True) == 0
