"""Section `model`: the policy's architecture, files and formats."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slipstream.conf.schema.rules import require


class Init(StrEnum):
    """Where the policy's first weights come from."""

    checkpoint = "checkpoint"
    random = "random"


class DType(StrEnum):
    """Floating-point format of stored weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class EngineFormat(StrEnum):
    """Format of an engine's weights."""

    checkpoint = "checkpoint"
    block_fp8 = "block_fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy: which architecture, from which files, in which format."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer). Required when init=checkpoint."""
    init: Init = Init.checkpoint
    """checkpoint: read weights from `path`. random: draw them from `run.seed`; they are the same for any layout."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config fields (model_type, hidden_size, ...). With init=random: the whole config if path is null,
    otherwise overrides of path's config.json. initializer_range is the standard deviation of random weights, by
    default 0.02."""
    dtype: DType = DType.bfloat16
    """Format of the frozen weights, of the engine's weights and of activations."""
    engine_format: EngineFormat = EngineFormat.checkpoint
    """Format of the engines' weights. checkpoint: block-FP8 if the quantization_config of config.json asks for it,
    otherwise `dtype`. block_fp8: block-FP8 (128 x 128, DeepSeek-V3's) even if config.json has none. The trainer's base
    always has `dtype`, and a publish quantizes the merged weights."""
    tokenizer: str | None = None
    """Folder with tokenizer.json, or `characters`: one token per printable character, made by Slipstream. null: the
    tokenizer in `path`."""

    def __post_init__(self) -> None:
        require(self.init_std > 0, f"model.hf_config.initializer_range must be > 0, got {self.init_std}")
        if self.init is Init.checkpoint:
            require(
                self.path is not None,
                "model.path is required when model.init=checkpoint; give a checkpoint folder, or choose a model that "
                "brings its own: model=tiny_qwen3_moe (a whole run to try: experiment=quickstart)",
            )
            require(
                not self.hf_config,
                "model.hf_config is only read when model.init=random; choose model=checkpoint, which has none, or set "
                "model.init=random",
            )
        else:
            require(
                bool(self.path or self.hf_config),
                "model.init=random needs model.hf_config (or model.path with a config.json)",
            )

    @property
    def init_std(self) -> float:
        return self.hf_config.get("initializer_range", 0.02)
