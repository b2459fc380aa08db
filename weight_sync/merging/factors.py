"""Which matrices an engine merges for itself, what it must know of each beside W, A and B, and which parts one launch
merges. Plain data, no torch.

Factors are named after their matrix, and have the trainer's own format and rank, because a merge's bits depend on both:

    model.layers.0.self_attn.q_proj.weight           (out, in)    in the engine: W + scale * B @ A
    model.layers.0.self_attn.q_proj.weight.lora_A    (r, in)      one for gate and up of an expert, under gate's name
    model.layers.0.self_attn.q_proj.weight.lora_B    (out, r)

A run is equal bands of a parameter at equal distances, as a layer's experts are:

    w13_weight of one of two engine ranks       row of the trainer's stack      A             B
    expert 3, its rows of gate                  3 * 2I                          of expert 3   (I / 2, r)
              its rows of up                    3 * 2I + I                      of expert 3   (I / 2, r)
    expert 4, its rows of gate                  4 * 2I                          of expert 4   (I / 2, r)

Factors of a run lie one below the other in two more parameters of the engine, so that they cross the link in few pieces
and a kernel walks them with two strides. A matrix that has no such neighbours is a run of one band.

Owns: names, what is said of a merge, and runs. trainer/weights/factors.py finds merges, replica/own_merge.py does them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import DestLayout, Load, Param, Region, TensorMeta

A_SUFFIX, B_SUFFIX = ".lora_A", ".lora_B"
MERGE_ROWS = 256
"""Rows of one product of a merge on the host; plans reckon its scratch from these two. Larger means fewer kernels,
smaller less scratch and less waste at the edges of a rectangle."""
ROUNDED_ROWS = 32
"""Rows that are rounded at once on the host."""


@dataclass(frozen=True, slots=True)
class Merge:
    """How one matrix of the checkpoint is merged; MergeOperands has the meanings."""

    tensor: str
    a: TensorMeta
    b: TensorMeta
    scale: float
    first_row: int
    """Row under its A that row 0 of the matrix is: that of gate or up in a stack of experts."""
    rows_a_factor: int
    stack_row: int
    key: int | None


@dataclass(frozen=True, slots=True)
class OwnMergeSpec:
    """What an engine that merges for itself is told at its start."""

    folder: str
    """The checkpoint on the engine's machine that holds the base."""
    on_device: bool
    """Whether the base is kept beside the parameters, or else in host memory."""
    merges: tuple[Merge, ...]


def is_factor(name: str) -> bool:
    """Whether a parameter of an engine is a factor of an adapter that it merges."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def factor_tensors(merges: Iterable[Merge]) -> tuple[TensorMeta, ...]:
    return tuple({meta.name: meta for merge in merges for meta in (merge.a, merge.b)}.values())


@dataclass(slots=True)
class Run:
    """Loads of one parameter that are merged together, in the order in which they lie."""

    bands: list[tuple[Load, Merge]]

    @property
    def pitch(self) -> int:
        """Rows of the trainer's stack from one band's start to the next one's; 0 for one band."""
        return _stack_row(*self.bands[1]) - _stack_row(*self.bands[0]) if self.bands[1:] else 0

    @property
    def distance(self) -> int:
        """Elements of the parameter from one band's start to the next one's; 0 for one band."""
        return self.bands[1][0].offset - self.bands[0][0].offset if self.bands[1:] else 0

    @property
    def factors(self) -> tuple[str, str]:
        """The parameters in which its A and B arrive."""
        first, _ = self.bands[0]
        return f"{first.param}.{first.offset}{A_SUFFIX}", f"{first.param}.{first.offset}{B_SUFFIX}"

    def takes(self, load: Load, merge: Merge) -> bool:
        """Whether this load is the next band."""
        (first, like), (last, before) = self.bands[0], self.bands[-1]
        is_alike = (
            _form(load, merge) == _form(first, like)
            and merge.stack_row - before.stack_row in (0, merge.rows_a_factor)
            and (merge.stack_row == before.stack_row) == (merge.a.name == before.a.name)
        )
        distance, pitch = load.offset - last.offset, _stack_row(load, merge) - _stack_row(last, before)
        if not is_alike or pitch <= 0:
            return False
        return len(self.bands) == 1 or (distance, pitch) == (self.distance, self.pitch)

    def params(self) -> tuple[Param, Param]:
        """Memory for A, (factors * r, in), and for B, (bands * rows, r)."""
        load, merge = self.bands[0]
        (rank, columns), rows = merge.a.shape, load.region.shape[0]
        a, b = self.factors
        stack = Param(a, (len(self._stacked()) * rank, columns), merge.a.dtype)
        return stack, Param(b, (len(self.bands) * rows, rank), merge.b.dtype)

    def factor_loads(self) -> list[Load]:
        """What goes there: the rows of B that belong to the bands, and whole A, each once."""
        a, b = self.factors
        whole = [(merge.a, Region((0, 0), (merge.a.shape[0], merge.a.shape[1]))) for merge in self._stacked()]
        rows = [
            (merge.b, Region((load.region.start[0], 0), (load.region.shape[0], merge.b.shape[1])))
            for load, merge in self.bands
        ]
        return [
            Load(meta.name, region, (0, 1), name, number * region.num_elements, (region.shape[1], 1))
            for name, of in ((a, whole), (b, rows))
            for number, (meta, region) in enumerate(of)
        ]

    def _stacked(self) -> list[Merge]:
        return list({merge.a.name: merge for _, merge in self.bands}.values())


def runs_of(layout: DestLayout, merges: Mapping[str, Merge]) -> list[Run]:
    """All that an engine rank merges.

    Raises PlanError where a matrix does not lie row by row in its parameter.
    """
    by_param: dict[str, list[tuple[Load, Merge]]] = defaultdict(list)
    for load in layout.loads:
        if load.tensor in merges:
            if load.axes != (0, 1) or load.stride[1] != 1:
                raise PlanError(
                    f"rank {layout.rank}: {load.tensor} does not lie row by row in {load.param}, so this engine cannot "
                    "merge it; set weight_sync.remote_merge=none"
                )
            by_param[load.param].append((load, merges[load.tensor]))
    runs: list[Run] = []
    for bands in by_param.values():
        joined: list[Run] = []
        for load, merge in sorted(bands, key=lambda band: band[0].offset):
            if joined and joined[-1].takes(load, merge):
                joined[-1].bands.append((load, merge))
            else:
                joined.append(Run([(load, merge)]))
        runs += joined
    return runs


def with_factors(layout: DestLayout, runs: Sequence[Run]) -> DestLayout:
    """A layout, and as further parameters the factors that its rank needs."""
    params = [param for run in runs for param in run.params()]
    loads = [load for run in runs for load in run.factor_loads()]
    return replace(layout, params=(*layout.params, *params), loads=(*layout.loads, *loads))


def _stack_row(load: Load, merge: Merge) -> int:
    return merge.stack_row + merge.first_row + load.region.start[0]


def _form(load: Load, merge: Merge) -> tuple[object, ...]:
    """What bands of a run have in common."""
    columns = load.region.start[1], load.region.shape, load.stride
    formats = merge.a.shape, merge.a.dtype, merge.b.shape[1], merge.b.dtype
    return *columns, *formats, merge.scale, merge.rows_a_factor, merge.key
