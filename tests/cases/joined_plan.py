"""A small plan that tests break by hand, and what a proof says of it."""

import dataclasses

from oracles.scalar_proof import prove_by_element

from cases.plan_tables import table_of
from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import DestLayout, Load, Param, Region, SourceLayout, SourceShard, TensorMeta
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.proof import prove_coverage
from slipstream.weight_sync.plan.transfer_plan import Piece, Task, TransferPlan


def is_refused(prove, plan: TransferPlan, replicas, sources) -> str:
    """What a proof says against a plan; empty where it accepts it."""
    try:
        prove(plan, replicas, sources)
    except PlanError as error:
        return str(error) or "refused"
    return ""


class Joined:
    """A parameter of 2 x 4 elements, loaded from two tensors of 2 x 2 side by side, or of two rows of another."""

    def __init__(self) -> None:
        metas = (TensorMeta("t", (2, 4), "float32"), TensorMeta("u", (2, 4), "float32"))
        whole = Region((0, 0), (2, 4))
        self.sources = (SourceLayout(0, metas, (SourceShard("t", whole), SourceShard("u", whole))),)
        self.layout = DestLayout(
            0,
            (Param("p", (2, 4), "float32"), Param("q", (2, 4), "float32")),
            (
                Load("t", Region((0, 0), (1, 4)), (0, 1), "p", 0, (4, 1)),
                Load("u", Region((1, 0), (1, 4)), (0, 1), "p", 4, (4, 1)),
                Load("u", Region((0, 0), (1, 4)), (0, 1), "q", 0, (4, 1)),
                Load("t", Region((1, 0), (1, 4)), (0, 1), "q", 4, (4, 1)),
            ),
        )
        self.plan = build_plan(self.sources, [[self.layout]], max_task_bytes=64)

    def refused(self, tasks: list[Task], **changes: object) -> str:
        plan = dataclasses.replace(self.plan, tasks={0: table_of(0, tasks)}, **changes)
        by_element = is_refused(prove_by_element, plan, [[self.layout]], self.sources)
        by_columns = is_refused(prove_coverage, plan, [[self.layout]], self.sources)
        assert bool(by_element) == bool(by_columns), (by_element, by_columns)
        return by_columns

    def task(self, param: str, *pieces: Piece, at: int = 0, num_bytes: int = 32) -> Task:
        return dataclasses.replace(
            next(iter(self.plan.tasks[0])), param=param, pieces=pieces, dest_offset_bytes=at, num_bytes=num_bytes
        )

    @property
    def right(self) -> list[Task]:
        return list(self.plan.tasks[0])
