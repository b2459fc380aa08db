"""A small system to plan for, and what tests of plans ask of them."""

from hypothesis import HealthCheck, settings

from cases.layouts import engine_rank, shard_rows, tiny_checkpoint
from slipstream.weight_sync.layout import SourceLayout, SourceShard
from slipstream.weight_sync.plan.transfer_plan import Task, TransferPlan

PROPERTY = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def all_tasks(plan: TransferPlan) -> list[Task]:
    return [task for tasks in plan.tasks.values() for task in tasks]


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
