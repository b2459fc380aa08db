"""`slipstream record`: how an engine lays out a model, rank by rank, written down without a GPU, weights or an engine.

    MODEL/config.json, headers of its safetensors or conf.architecture --> rollout.layouts --> cache, figures

Owns: where the list of checkpoint tensors comes from, and the figures. Does not own the recording or its cache
(`rollout.layouts.offline_layout`).
"""

from dataclasses import dataclass
from pathlib import Path

from slipstream.conf.architecture.families import read_config
from slipstream.conf.checks.tensor_parallel import check_tp_size_fits_model
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Device, DType
from slipstream.orchestrator.files.outputs import check_can_write, write_output
from slipstream.orchestrator.inputs.model_files import read_hf_config
from slipstream.rollout.errors import EngineError
from slipstream.rollout.layouts.offline_layout import LayoutRequest, engine_version, offline_layouts
from slipstream.weight_sync.disk.safetensors_files import read_index, tensor_metas
from slipstream.weight_sync.layout import DestLayout, TensorMeta
from slipstream.weight_sync.record.layout_wire import layouts_digest, layouts_to_bytes


@dataclass(frozen=True, slots=True)
class RankFigures:
    rank: int
    num_params: int
    num_loads: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class RecordReport:
    model: str
    engine: str
    """Name and version of the engine whose loader was asked."""
    tp_size: int
    expert_parallel: bool
    dtype: str
    device: str
    tensors_from: str
    num_tensors: int
    ranks: tuple[RankFigures, ...]
    digest: str
    """sha256 over all ranks; equal digests are equal layouts."""
    cache: str
    """File of the cache that holds the layouts; empty where it could not be written."""
    was_cached: bool

    def as_text(self) -> str:
        lines = [
            f"{self.model}: {self.num_tensors} checkpoint tensors (from {self.tensors_from})",
            f"engine    {self.engine}, tp {self.tp_size}, expert parallel {'on' if self.expert_parallel else 'off'}, "
            f"{self.dtype} on {self.device}",
        ]
        lines += [
            f"rank {r.rank:<4} {r.num_params:>6} parameters {r.num_loads:>8} loads {r.num_bytes / 1e9:>9.3f} GB  "
            f"{r.digest[:16]}"
            for r in self.ranks
        ]
        lines.append(f"digest    {self.digest}")
        if self.cache:
            lines.append(f"cache     {self.cache}{' (was there)' if self.was_cached else ''}")
        return "\n".join(lines)


def record(
    model: Path,
    *,
    tp_size: int,
    enable_expert_parallel: bool,
    dtype: str,
    device: str,
    cache: Path | None = None,
    out: Path | None = None,
) -> RecordReport:
    """Record, or take from the cache, the layouts of one engine."""
    if out is not None:
        check_can_write(out, f"--out={out}")
    if dtype not in list(DType):
        raise ConfigError(f"--dtype must be one of {', '.join(DType)}, got {dtype!r}")
    hf_config = read_hf_config(model, "MODEL")
    check_tp_size_fits_model("--tp", tp_size, hf_config, is_expert_parallel=enable_expert_parallel)
    tensors, source = _tensors(model, hf_config, dtype)
    request = LayoutRequest(
        hf_config=hf_config,
        tensors=tensors,
        tp_size=tp_size,
        enable_expert_parallel=enable_expert_parallel,
        dtype=DType(dtype),
        device=Device(device),
    )
    try:
        file = request.file(cache)
        was_cached = file.is_file()
        layouts = offline_layouts(request, cache)
    except EngineError as error:
        raise ConfigError(str(error)) from error
    data = layouts_to_bytes(layouts)
    if out is not None:
        try:
            write_output(out, data)
        except OSError as error:
            raise ConfigError(f"--out={out} cannot be written: {error}") from error
    return RecordReport(
        model=str(model),
        engine=engine_version(),
        tp_size=tp_size,
        expert_parallel=enable_expert_parallel,
        dtype=dtype,
        device=device,
        tensors_from=source,
        num_tensors=len(tensors),
        ranks=tuple(_figures(layout) for layout in layouts),
        digest=layouts_digest(layouts),
        cache=str(file) if file.is_file() else "",
        was_cached=was_cached,
    )


def _figures(layout: DestLayout) -> RankFigures:
    num_bytes = sum(param.num_bytes for param in layout.params)
    return RankFigures(layout.rank, len(layout.params), len(layout.loads), num_bytes, layouts_digest((layout,)))


def _tensors(model: Path, hf_config: JsonObject, dtype: str) -> tuple[tuple[TensorMeta, ...], str]:
    """The checkpoint's tensors, and where they are named: its files where there are any, else its architecture."""
    if model.is_dir() and any(model.glob("*.safetensors*")):
        return tensor_metas(read_index(model, "MODEL")), "its safetensors"
    return tuple(read_config(hf_config).checkpoint_tensors(dtype)), "its architecture"
