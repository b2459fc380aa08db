"""Finds out what an engine's own loader does: runs it once over empty tensors and writes down every copy it makes.

    checkpoint tensors               loader (the engine's, unchanged)                this module
    meta tensors, no data   --->   narrow, view, transpose, .to, ...   --->   TorchDispatchMode sees copy_ of
    their storage is remembered    param.data[...].copy_(piece)               a source's view to a parameter's view

A view shares its source's storage, so offset, shape and stride say which rectangle it is, whichever ops made it; no
list of allowed view ops is needed. The copy is recorded and not executed.

What an engine did to a parameter afterwards the caller declares. Invariant: exactly one load or fill accounts for every
element of every parameter that is not derived; otherwise RecordError is raised. Parameters keep their values.
"""

# pyright: basic
# torch's dispatch is untyped.
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.conf.failures import in_words, outcome_of
from slipstream.weight_sync.errors import RecordError
from slipstream.weight_sync.layout import DTYPE_BYTES, DestLayout, Load, Param, PostLoad, TensorMeta
from slipstream.weight_sync.record.op_schema import mutated, schema_of, storage_of, tensors_in
from slipstream.weight_sync.record.strides import rectangles
from slipstream.weight_sync.record.tiling import Filled, account

aten = torch.ops.aten

_ALIASES = {aten.clone.default, aten.contiguous.default, aten._to_copy.default, aten.lift_fresh_copy.default}
"""Ops that return the same values in other memory: applied to a source, they are the identity (or a cast)."""
_STACKS = {aten.stack.default, aten.cat.default}
"""Ops that put whole sources one after the other into fresh memory (a loader that gathers experts)."""
_FILLS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
_WRITES = {aten.copy_.default, *_FILLS}


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint tensor as the loader sees it, possibly cast."""

    meta: TensorMeta
    dtype: torch.dtype
    is_narrowed: bool
    """Whether a cast lost values; then it may only be copied to a parameter of exactly that dtype."""
    base: Tensor
    """Keeps the storage alive, so that its identity stays unique."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """Sources stacked along a first dim: entry i of that dim is sources[i], of shape base.shape[1:]."""

    sources: tuple[Tensor, ...]
    base: Tensor


class _Span(NamedTuple):
    start: int
    stop: int
    name: str


def record_layout(
    load_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    params: Mapping[str, Tensor],
    tensors: Sequence[TensorMeta],
    rank: int,
    *,
    post_load: Mapping[str, PostLoad] | None = None,
    left_out: Collection[str] = (),
) -> DestLayout:
    """Run a loader over recording tensors and return what it copies to which place.

    Args:
        load_weights: the engine's loader; called once with (name, meta tensor) pairs. It may skip tensors.
        params: every parameter that the loader may write, on any device, contiguous; and the derived ones, with any
            strides. Several names of the same memory (tied weights) are one parameter, under the first name.
        rank: the engine rank inside its replica.
        post_load: what the engine does to a parameter after loading; identity for those that are absent. Derived ones
            need not be written.
        left_out: parameters that do not belong to the layout. They keep their values, too, but nothing checks what the
            loader writes to them.

    Raises:
        RecordError: the loader computes with a source, writes a parameter other than by copying a rectangle or filling
            a constant, leaves a parameter (partly) unwritten, or writes an element twice.
    """
    formats = dict(post_load or {})
    unknown = sorted(set(formats) - set(params))
    if unknown:
        raise RecordError(f"post-load formats are declared for unknown parameters: {', '.join(unknown)}")
    derived = {name for name, form in formats.items() if form is PostLoad.derived}
    written = {name: param for name, param in params.items() if name not in derived}
    recorder = _Recorder(written, tensors, frozenset(left_out))
    before = {name: (param.data_ptr(), param.shape, param.stride()) for name, param in params.items()}
    with torch.inference_mode(mode=False), torch.no_grad(), recorder:
        failure = outcome_of(load_weights, recorder.stream())
    error = recorder.error or failure  # the loader may have swallowed the first
    if isinstance(error, RecordError):
        raise error
    if isinstance(failure, Exception):  # the loader itself may refuse a tensor without data
        failed = f"the loader failed on {recorder.current or 'the first tensor'}: {in_words(failure).rstrip(': ')}"
        raise RecordError(f"{failed}; is it a tensor of the engine's own model?") from failure
    for name, param in params.items():
        if (param.data_ptr(), param.shape, param.stride()) != before[name]:
            raise RecordError(f"{name}: the loader replaced its memory; a one-sided write needs an address that stays")
    described = tuple(
        Param(name, tuple(param.shape), _dtype_name(param.dtype), formats.get(name, PostLoad.identity))
        for name, param in params.items()
        if name not in left_out and (name in recorder.names or name in derived)
    )
    loads, fills = account(described, recorder.written)
    return DestLayout(rank, described, loads, fills)


class _Recorder(TorchDispatchMode):
    """Sees every op of the loader, and keeps in order what is written to parameters."""

    def __init__(self, params: Mapping[str, Tensor], tensors: Sequence[TensorMeta], left_out: frozenset[str]) -> None:
        super().__init__()
        self.params = params
        self.tensors = tensors
        self.left_out = left_out
        self.names: set[str] = set()
        self.written: list[Load | Filled] = []
        self.current = ""
        self.error: RecordError | None = None
        self._sources: dict[int, _Source] = {}
        self._stacks: dict[int, _Stack] = {}
        self._constants: dict[int, tuple[float, Tensor]] = {}
        """Numbers that will be written into a parameter: `param[...] = 0` first makes a tensor of the 0."""
        self._spans: dict[int, list[_Span]] = {}
        self._storages: list[Any] = []  # kept alive, because identities are compared
        for name, param in params.items():
            self._add_param(name, param)

    def _add_param(self, name: str, param: Tensor) -> None:
        if param.numel() == 0:
            raise RecordError(
                f"{name} is empty: the engine keeps the real weight elsewhere, where no write can reach it"
            )
        if not param.is_contiguous():
            raise RecordError(
                f"{name} has shape {list(param.shape)} and stride {list(param.stride())}; it must be contiguous"
            )
        if _dtype_name(param.dtype) not in DTYPE_BYTES:
            raise RecordError(f"{name} has dtype {param.dtype}; known are {', '.join(DTYPE_BYTES)}")
        start = int(param.storage_offset()) * param.element_size()
        span = _Span(start, start + param.numel() * param.element_size(), name)
        spans = self._spans.setdefault(storage_of(param), [])
        for other in spans:
            if (other.start, other.stop) == (span.start, span.stop) and self.params[other.name].dtype == param.dtype:
                return  # a second name of the same memory
            if other.start < span.stop and span.start < other.stop:
                raise RecordError(f"{name} and {other.name} overlap in memory without being the same parameter")
        spans.append(span)
        spans.sort()
        self._storages.append(param.untyped_storage())
        self.names.add(name)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint, without data."""
        for meta in self.tensors:
            self.current = meta.name
            dtype = getattr(torch, meta.dtype)
            tensor = torch.empty(meta.shape, dtype=dtype, device="meta")
            self._sources[storage_of(tensor)] = _Source(meta, dtype, False, tensor)
            yield meta.name, tensor

    def _source_of(self, tensor: object) -> _Source | None:
        return self._sources.get(_meta_storage(tensor))

    def _stack_of(self, tensor: object) -> _Stack | None:
        return self._stacks.get(_meta_storage(tensor))

    def _param_of(self, tensor: object) -> tuple[str, int] | None:
        """The parameter that a tensor is a view of, and the view's first element in it."""
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return None
        spans = self._spans.get(storage_of(tensor))
        if spans is None:
            return None
        at = tensor.storage_offset() * tensor.element_size()
        index = bisect_right(spans, at, key=lambda span: span.start) - 1
        if index < 0 or at >= spans[index].stop:
            return None
        span = spans[index]
        if tensor.dtype != self.params[span.name].dtype:
            raise RecordError(f"{span.name} is written as {tensor.dtype}, it is {self.params[span.name].dtype}")
        return span.name, (at - span.start) // tensor.element_size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._see(func, args, kwargs or {})
        except RecordError as error:
            self.error = self.error or error
            raise

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a copy or a fill, let views and unrelated ops run, and refuse other ops."""
        if func in _WRITES and self._is_left_out(args[0]):
            return args[0]
        if func is aten.copy_.default:
            stack = self._stack_of(args[1])
            return self._copy(func, args, kwargs) if stack is None else self._copy_stack(func, args, kwargs, stack)
        if func is aten.scalar_tensor.default:
            number = func(*args, **kwargs)
            self._constants[storage_of(number)] = (float(args[0]), number)
            return number
        if func in _STACKS and any(self._source_of(one) for one in args[0]):
            return self._stack(func, args, kwargs)
        source = next((found for found in map(self._source_of, tensors_in((args, kwargs))) if found), None)
        if func in _FILLS and source is None:
            return self._fill(func, args, kwargs)
        if func is aten.zero_.default and source is not None:
            return self._drop(args[0], source)
        schema = schema_of(func)
        self._refuse_other_writes(func, mutated(schema, args, kwargs), source)
        if source is None:
            return func(*args, **kwargs)
        if func in _ALIASES:
            return self._alias(func, args[0], source, kwargs.get("dtype"))
        if not schema.is_view:
            raise RecordError(
                f"{source.meta.name}: {func} computes with it; only views, casts and copies of a checkpoint tensor can "
                "be replayed"
            )
        result = func(*args, **kwargs)
        for leaf in tensors_in(result):
            if self._source_of(leaf) is not source or leaf.dtype != source.dtype or leaf.is_neg() or leaf.is_conj():
                raise RecordError(f"{source.meta.name}: {func} reinterprets it")
        return result

    def _is_left_out(self, tensor: Tensor) -> bool:
        target = self._param_of(tensor) if self.left_out else None
        return target is not None and target[0] in self.left_out

    def _refuse_other_writes(self, func: Any, written: Iterable[tuple[str, Tensor]], source: _Source | None) -> None:
        """Refuse an op other than a copy or a fill that writes a parameter, or writes while it reads the checkpoint."""
        for name, tensor in written:
            target = self._param_of(tensor)
            if target is not None:
                raise RecordError(
                    f"{target[0]}: {func} writes it (argument {name}, while loading {self.current}); only copies of "
                    "checkpoint tensors and constant fills can be replayed"
                )
            if source is not None:
                raise RecordError(f"{source.meta.name}: {func} writes argument {name} of an op that reads it")
            if self._stack_of(tensor) is not None:
                raise RecordError(f"while loading {self.current}: {func} changes the values of a stack")

    def _drop(self, tensor: Tensor, source: _Source) -> Tensor:
        """Treat the tensor as a constant 0 after `weight.zero_()`, as for a bias that only the first rank adds."""
        if tensor.numel() != source.base.numel():
            raise RecordError(f"{source.meta.name}: a part of it is set to 0, the rest is not")
        storage = storage_of(tensor)
        del self._sources[storage]
        self._constants[storage] = (0.0, tensor)
        return tensor

    def _alias(self, func: Any, tensor: Tensor, source: _Source, dtype: torch.dtype | None) -> Tensor:
        """The same rectangle again: the view itself, or, after a cast, the same view of an equal source."""
        if dtype is None or dtype == source.dtype:
            return aten.alias.default(tensor)
        if source.is_narrowed:
            raise RecordError(f"{source.meta.name}: {func} casts it to {dtype} after {source.dtype} had lost values")
        base = torch.empty(source.meta.shape, dtype=dtype, device="meta")
        is_narrowed = torch.promote_types(source.dtype, dtype) != dtype
        self._sources[storage_of(base)] = _Source(source.meta, dtype, is_narrowed, base)
        return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _stack(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Remember the source of each entry. Refuse stacks but along the first dim: they leave entries in one piece."""
        parts: list[Tensor] = list(args[0])
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        meta = next(found.meta for found in map(self._source_of, parts) if found)
        alike = {(tuple(part.shape), part.dtype) for part in parts}
        if func is not aten.stack.default or dim != 0 or len(alike) != 1 or not all(map(self._source_of, parts)):
            raise RecordError(
                f"{meta.name}: {func} joins it with other tensors; only torch.stack(..., dim=0) of equal checkpoint "
                "tensors can be replayed"
            )
        base = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype, device="meta")
        self._stacks[storage_of(base)] = _Stack(tuple(parts), base)
        return base

    def _copy_stack(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stack: _Stack) -> Tensor:
        """One copy from each of the stack's entries."""
        dest, value = args[0], args[1]
        entry_size = stack.base.stride(0)
        first = int(value.storage_offset()) // entry_size if entry_size else 0
        whole = value.dim() == stack.base.dim() and value.stride() == stack.base.stride()
        if dest.shape != value.shape or value.dtype != stack.base.dtype or not whole:
            raise RecordError(
                f"while loading {self.current}: a view of shape {list(value.shape)} and stride {list(value.stride())} "
                f"is copied from a stack of shape {list(stack.base.shape)}; only parts of its entries can be replayed"
            )
        inside = int(value.storage_offset()) - first * entry_size
        for index in range(value.shape[0]):
            entry = stack.sources[first + index]
            if not entry.is_contiguous():
                raise RecordError(f"while loading {self.current}: a stack of tensors that are not contiguous")
            part = entry.as_strided(value.shape[1:], value.stride()[1:], entry.storage_offset() + inside)
            self._copy(func, (dest.select(0, index), part), kwargs)
        return dest

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        dest, value = args[0], args[1]
        source, target = self._source_of(value), self._param_of(dest)
        if self._source_of(dest) is not None:
            raise RecordError(f"{self._sources[storage_of(dest)].meta.name}: the loader writes into it")
        if source is None and target is None:
            return func(*args, **kwargs)
        if source is None:
            constant = self._constants.get(storage_of(value))
            if constant is not None:
                return self._fill(func, (dest, constant[0]), {})
            if value.dim() == 0 and value.device.type == "cpu":  # param[...] = number
                return self._fill(func, (dest, value), {})
            assert target is not None
            raise RecordError(
                f"{target[0]}: written with a {value.dtype} tensor of shape {list(value.shape)} that is no part of a "
                f"checkpoint tensor (while loading {self.current})"
            )
        if target is None:
            raise RecordError(
                f"{source.meta.name}: copied into a tensor of shape {list(dest.shape)} that is no parameter"
            )
        name, offset = target
        if value.dtype != source.dtype:
            raise RecordError(f"{source.meta.name}: copied to {name} with its bits read as {value.dtype}")
        if source.is_narrowed and dest.dtype != source.dtype:
            raise RecordError(
                f"{source.meta.name}: cast to {source.dtype}, which loses values, before it is copied to {name} of "
                f"{dest.dtype}"
            )
        if dest.numel() == 0:
            return dest
        try:
            value = value.expand(dest.shape)
            found = rectangles(
                source.meta.shape, tuple(dest.shape), value.stride(), int(value.storage_offset()), dest.stride()
            )
        except (ValueError, RuntimeError) as error:
            raise RecordError(
                f"{source.meta.name} of shape {list(source.meta.shape)}: the part that {func} copies to {name} (shape "
                f"{list(args[1].shape)}, stride {list(args[1].stride())}) is no rectangle: {error}"
            ) from error
        for part in found:
            self.written.append(Load(source.meta.name, part.region, part.axes, name, offset + part.offset, part.stride))
        return dest

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        dest: Tensor = args[0]
        target = self._param_of(dest)
        if target is None:
            return func(*args, **kwargs)
        value = args[1] if len(args) > 1 else kwargs.get("value", 0.0)
        if isinstance(value, Tensor):
            value = value.item()
        if dest.numel():
            name, offset = target
            self.written.append(Filled(name, offset, tuple(dest.shape), dest.stride(), float(value)))
        return dest


def _meta_storage(tensor: object) -> int:
    """The storage of a tensor on meta; -1 for anything else."""
    return storage_of(tensor) if isinstance(tensor, Tensor) and tensor.device.type == "meta" else -1


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
