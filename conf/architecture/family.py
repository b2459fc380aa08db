"""Family: how a model_type's config is read, and where it differs from others before a spec is made of it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.conf.architecture.config_fields import Fields
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.json_files import JsonMapping, JsonObject
from slipstream.conf.schema import DType


@dataclass(frozen=True, slots=True)
class EngineAttention:
    """What engines ask of a kind of attention that is not grouped queries. They have no slots for its adapters."""

    kind: str
    divided: tuple[str, ...] = ()
    """Fields of config.json that count heads, which an engine's ranks divide."""
    arguments: JsonMapping = field(default_factory=JsonObject)
    """vLLM gets these, too."""
    cpu_dtype: DType | None = None
    """The only format in which the CPU engine computes it; None: any."""
    cpu_widths: tuple[tuple[str, int], ...] = ()
    """Fields of config.json, and the only width of heads that the CPU engine's kernel takes."""


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of `families.FAMILIES`. Defaults are those of a family that is not in it, which an engine may know."""

    read: Callable[[Fields], ModelSpec] | None = None
    wrapper: str | None = None
    """model_type of checkpoints in which this model is beside a vision tower, and its config is `text_config`."""
    left_out: JsonMapping = field(default_factory=JsonObject)
    """Fields that such checkpoints need not have, and what transformers takes them for."""
    head_dim: int | None = None
    """Elements of a head where the config does not say; None: hidden_size / num_attention_heads."""
    expert_width: str = "moe_intermediate_size"
    """Field of the routed experts' width."""
    cuts_all: bool = False
    """Its engine's ranks cut every key/value head's group and every expert: none of them is held whole by all."""
    engine_constants: tuple[tuple[str, float], ...] = ()
    """Fields of its config that vLLM's model ignores, and the values that it has instead."""
    has_engine_forward: bool = False
    """trainer/engine_ops has its forward in the engine's kernels (parity=bitwise)."""
    other_attention: EngineAttention | None = None
    """In all layers or in some, instead of grouped queries."""
    engine_fields: Callable[[JsonObject], JsonObject] | None = None
    """Reads from its config the fields that vLLM takes beside those of transformers' class."""
    engine_imports: tuple[str, ...] = ()
    """Packages that vLLM's file of it imports, and that set-up leaves out for CPUs."""
    needs_deep_gemm: bool = False
    """Its engine computes in kernels that DeepGEMM compiles when they are first called."""
    fills_slots: bool = True
    """An engine's slot of q, k and v holds an adapter of each."""
    names_slots: bool = True
    """Adapter files have names for the projections of its experts."""
    lacks_on_cpu: str | None = None
    """What the CPU engine does not do of it."""
