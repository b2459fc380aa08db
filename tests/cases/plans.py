"""Small systems to plan for, and what tests of plans ask of them."""

from collections.abc import Collection, Mapping, Sequence

from hypothesis import HealthCheck, settings

from cases.layouts import engine_rank, rows, shard_rows, tiny_checkpoint
from slipstream.weight_sync.layout import DestLayout, Load, Param, Region, SourceLayout, SourceShard, TensorMeta
from slipstream.weight_sync.plan.transfer_plan import Task, TransferPlan

PROPERTY = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def all_tasks(plan: TransferPlan) -> list[Task]:
    return [task for tasks in plan.tasks.values() for task in tasks]


def copied(
    shapes: Mapping[str, tuple[int, ...]], held: Sequence[Collection[str]] | None = None, dtype: str = "float32"
) -> tuple[list[SourceLayout], DestLayout]:
    """Sources, each of which holds these tensors (one that holds all, if not given), and an engine rank that loads each
    whole into a parameter of its name."""
    metas = tuple(TensorMeta(name, shape, dtype) for name, shape in shapes.items())
    whole = {name: Region((0,) * len(shape), shape) for name, shape in shapes.items()}
    sources = [
        SourceLayout(rank, metas, tuple(SourceShard(name, whole[name]) for name in shapes if name in own))
        for rank, own in enumerate([shapes] if held is None else held)
    ]
    loads = [Load(name, whole[name], tuple(range(len(of))), name, 0, rows(of)) for name, of in shapes.items()]
    return sources, DestLayout(0, tuple(Param(name, of, dtype) for name, of in shapes.items()), tuple(loads))


def small_system(num_sources: int = 2, tp_size: int = 2, num_replicas: int = 2):
    """Experts by EP, everything else by rows; two replicas of TP=2."""
    tensors = tiny_checkpoint(2, 4, hidden=8, heads=4, kv_heads=2, head_dim=2, inter=4, vocab=8)
    held: list[list[SourceShard]] = [[] for _ in range(num_sources)]
    for meta in tensors:
        if ".experts." in meta.name:
            expert = int(meta.name.split(".experts.")[1].split(".")[0])
            held[expert % num_sources].append(SourceShard(meta.name, shard_rows(meta, [0, meta.shape[0]])[0]))
        else:
            step = -(-meta.shape[0] // num_sources)
            edges = [min(i * step, meta.shape[0]) for i in range(num_sources + 1)]
            for rank, region in enumerate(shard_rows(meta, edges)):
                held[rank].append(SourceShard(meta.name, region))
    sources = [SourceLayout(rank, tensors, tuple(shards)) for rank, shards in enumerate(held)]
    return sources, [[engine_rank(tensors, rank, tp_size) for rank in range(tp_size)] for _ in range(num_replicas)]
