"""Predicts a publish with relay: which replicas the trainer writes, which read from a neighbour, and the time of that.

Owns: the reads after the writes; predict.py predicts the writes. Does not own: the relay itself
(fleet/relay.py, which reads in the same rounds). Pure.
"""

from collections.abc import Mapping, Sequence

from slipstream.weight_sync.layout import DestLayout, PostLoad
from slipstream.weight_sync.prediction.links import LinkRates, Placement
from slipstream.weight_sync.prediction.predict import HASH_PASSES


def neighbours(placement: Placement) -> dict[int, list[int]]:
    """Replica that is written -> replicas that read from it. One that spans nodes is written, and none reads it."""
    nodes: dict[int, set[int]] = {}
    for (replica, _), gpu in placement.engine_gpus.items():
        nodes.setdefault(replica, set()).add(placement.node_of(gpu))
    readers: dict[int, list[int]] = {}
    first_of: dict[int, int] = {}
    for replica in sorted(nodes):
        (node, *others) = nodes[replica]
        primary = replica if others else first_of.setdefault(node, replica)
        readers.setdefault(primary, [])
        if primary != replica:
            readers[primary].append(replica)
    return readers


def written_alone(placement: Placement, primaries: Sequence[int]) -> Placement:
    """The same GPUs with only these replicas, numbered anew."""
    number = {replica: i for i, replica in enumerate(primaries)}
    engine_gpus = {(number[r], rank): gpu for (r, rank), gpu in placement.engine_gpus.items() if r in number}
    return Placement(placement.ranks_per_node, placement.trainer_gpus, engine_gpus)


def num_rounds(num_readers: int) -> int:
    """Rounds until all have read. In a round, each replica that has the version is read by one that has it afterwards.

    0, 1, 2, 2, 3 for 0, 1, 2, 3, 4 readers: the smallest r with 2^r > readers.
    """
    return num_readers.bit_length()


def relay_s(
    readers: Mapping[int, Sequence[int]], engine: Sequence[DestLayout], rates: LinkRates, *, verify_hashes: bool
) -> float:
    """Seconds from the commit of the replicas that were written until the last reader of any node serves.

    In a round, readers pause, every rank reads the peer's same rank over NVLink, hashes and resumes. Nodes do not share
    a link, and neither do the pairs of a round. Calls between workers, some milliseconds, are left out.
    """
    rounds = num_rounds(max((len(members) for members in readers.values()), default=0))
    slowest_s = 0.0
    for layout in engine:
        sent = [param.num_bytes for param in layout.params if param.post_load is not PostLoad.derived]
        read_s = rates.write_latency_s + len(sent) * rates.op_s + sum(sent) / rates.nvlink_bytes_s
        hash_s = sum(sent) * HASH_PASSES / rates.hbm_bytes_s if verify_hashes else 0.0
        slowest_s = max(slowest_s, read_s + hash_s)
    return rounds * (rates.begin_s + slowest_s + rates.commit_s)
