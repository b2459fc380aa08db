"""The factors of an adapter as they are, for engines that merge for themselves: names, places, and what a merge needs.

Both `merges_of` and `factor_shards` follow `local_shards`, so that an engine is told the coordinates by which the
trainer merges. Nothing communicates.
"""

from collections.abc import Iterator

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import TrainerConfig
from slipstream.trainer.errors import LayoutError
from slipstream.trainer.model.build_decoder import build_whole
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.parallel import local_part
from slipstream.trainer.weights.row_runs import LoraDelta
from slipstream.trainer.weights.shards import HeldTensor, local_shards
from slipstream.weight_sync.layout import Region, TensorMeta
from slipstream.weight_sync.merging.factors import A_SUFFIX, B_SUFFIX, Merge


def planned_merges(spec: ModelSpec, dtype: str, trainer: TrainerConfig, seed: int | None) -> tuple[Merge, ...]:
    """merges_of a trainer that need not exist. Thresholds depend on the seed; None: merged values are rounded to
    nearest."""
    return merges_of(build_whole(spec, dtype, trainer, seed))


def merges_of(decoder: Decoder) -> tuple[Merge, ...]:
    """Every merge of a decoder that lies whole on one rank. Raises LayoutError where one is not row by row."""
    merges: list[Merge] = []
    for held, delta, factor, a_name in _adapted(decoder):
        dtype = str(delta.b_parameter.dtype).removeprefix("torch.")
        rows, columns = held.region.shape
        merges.append(
            Merge(
                held.tensor,
                TensorMeta(a_name, (delta.rank, columns), dtype),
                TensorMeta(held.tensor + B_SUFFIX, (rows, delta.rank), dtype),
                delta.scale,
                delta.first_row + held.first_row - factor * delta.rows_a_factor,
                delta.rows_a_factor,
                delta.stack_row + factor * delta.rows_a_factor,
                delta.rounding_key,
            )
        )
    return tuple(merges)


def factor_shards(decoder: Decoder) -> Iterator[HeldTensor]:
    """The rectangles of factors that this rank holds."""
    known: set[str] = set()
    for held, delta, factor, a_name in _adapted(decoder):
        rows = Region((held.region.start[0], 0), (held.region.shape[0], delta.rank))
        yield HeldTensor(held.tensor + B_SUFFIX, rows, delta.b_parameter, held.first_row)
        if a_name in known:
            continue
        known.add(a_name)
        local, start = local_part(delta.a_parameter)
        if local.dim() == 3:
            yield HeldTensor(a_name, Region((0, 0), tuple(local.shape[1:])), delta.a_parameter, factor * delta.rank)
        elif local.shape[0]:
            yield HeldTensor(a_name, Region((start, 0), tuple(local.shape)), delta.a_parameter, 0)


def _adapted(decoder: Decoder) -> Iterator[tuple[HeldTensor, LoraDelta, int, str]]:
    """Every adapted rectangle, its factors, the index of its A in a stack of them, and the name of that A."""
    names: dict[tuple[int, int], str] = {}
    for held in local_shards(decoder):
        if held.delta is None:
            continue
        if not isinstance(held, HeldTensor):
            raise LayoutError(
                f"{held.tensor} is a stack of experts, which engines cannot merge; set weight_sync.remote_merge=none"
            )
        delta = held.delta
        factor = (delta.first_row + held.first_row) // delta.rows_a_factor
        yield held, delta, factor, names.setdefault((id(delta.a_parameter), factor), held.tensor + A_SUFFIX)
