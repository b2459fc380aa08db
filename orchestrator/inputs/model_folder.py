"""The model folder of a run: what engines and the prompt encoder read. Config and tokenizer, never weights.

Owns: `hf_config` (the one config that trainer and engines both see), generation_config.json, the tokenizer's files.
Does not own: weights (version 0 comes by publish).
Invariant: trainer and engines are built from the same config.json; no part of it is filled in by only one of them.
"""

import json
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from slipstream.conf.architecture.families import of_language_model, read_config
from slipstream.conf.architecture.spelling import check_spelling
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig, JsonObject, read_json_object
from slipstream.conf.schema import DType, EngineFormat, Init, ModelConfig, RunConfig
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.inputs.character_tokenizer import CHARACTERS, save_character_tokenizer
from slipstream.orchestrator.inputs.model_files import read_hf_config
from slipstream.orchestrator.inputs.text_encoder import TOKENIZER_FILE, check_holds_tokenizer
from slipstream.rollout.text.chat_template import PRESENT
from slipstream.rollout.types import RoutingShape
from slipstream.trainer.weights.quantization import BlockFp8, engine_tensors
from slipstream.weight_sync.layout import TensorMeta

_TOKENIZER_FILES = (
    *(TOKENIZER_FILE, "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    folder: Path
    hf_config: JsonObject


def prepare_model(config: ModelConfig, folder: Path, began: datetime | None = None) -> PreparedModel:
    """Write config.json, generation_config.json and the tokenizer into `folder`, each whole: a resumed run has them.
    Raises ConfigError: a file of model.path is missing or unreadable, model_type is unknown, or no tokenizer is named.
    `began`, when the run began, is what the chat template takes for the present, so that a resume has the same prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hf_config = resolve_hf_config(config)
    if config.tokenizer == CHARACTERS:
        save_character_tokenizer(folder, vocab_size=int(hf_config["vocab_size"]))
        for key, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
            hf_config[key] = token
    else:
        _copy_tokenizer(config, folder)
    write_whole(folder / "config.json", json.dumps(hf_config, indent=2) + "\n")
    source = Path(config.path) / "generation_config.json" if config.path else None
    special = {key: hf_config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in hf_config}
    generation = read_json_object(source) if source is not None and source.is_file() else special
    if config.tokenizer == CHARACTERS:
        generation |= special  # those of the model's own tokenizer are other characters here
    write_whole(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    if began is not None:
        write_whole(folder / PRESENT, began.isoformat())
    return PreparedModel(folder, hf_config)


def complete_export(model: Path, export: Path) -> None:
    """Put tokenizer and generation_config.json of what prepare_model() made beside an exported model, which can then be
    served as it is."""
    for name in (*_TOKENIZER_FILES, "generation_config.json"):
        if (model / name).is_file():
            shutil.copyfile(model / name, export / name)


def resolve_hf_config(config: ModelConfig) -> JsonObject:
    """config.json of model.path (of a model with a vision tower, its language model's), model.hf_config on top of it,
    and the format of the weights. Raises ConfigError: config.json cannot be read or describes no known model, or a
    field of model.hf_config is misspelt."""
    base: JsonObject = {}
    if config.path is not None:
        base = of_language_model(read_hf_config(Path(config.path), "model.path"))
    overrides = config.hf_config if config.init is Init.random else {}
    merged = {**base, **overrides}
    check_spelling(merged, overrides)
    merged.setdefault("architectures", [read_config(merged).hf_architecture])
    merged["dtype"] = merged["torch_dtype"] = config.dtype.value
    if config.engine_format is EngineFormat.block_fp8 and not merged.get("quantization_config"):
        tensors = read_config(merged).checkpoint_tensors(config.dtype.value)
        merged["quantization_config"] = BlockFp8.hf_entry(tensors)
    return merged


def engine_checkpoint(hf_config: HfConfig, dtype: DType) -> list[TensorMeta]:
    """Every tensor that an engine of this model loads. Raises: ConfigError, for one that cannot be published."""
    tensors = read_config(dict(hf_config)).checkpoint_tensors(dtype.value)
    return engine_tensors(tensors, BlockFp8.from_hf_config(hf_config))


def routing_shape(config: RunConfig, hf_config: JsonObject) -> RoutingShape | None:
    """What engines record about each token; None when nothing is replayed."""
    moe = read_config(hf_config).moe
    if not config.parity.replay_routing or moe is None:
        return None
    layers = tuple(layer for layer, has_experts in enumerate(moe.layers) if has_experts)
    return RoutingShape(layers, moe.top_k, moe.num_experts)


def _copy_tokenizer(config: ModelConfig, folder: Path) -> None:
    source = Path(config.tokenizer or config.path or "")
    if not (config.tokenizer or config.path):
        raise ConfigError("model.tokenizer is required when model.path is null; give a folder, or `characters`")
    check_holds_tokenizer("model.tokenizer" if config.tokenizer else "model.path", source)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            write_whole(folder / name, (source / name).read_bytes())
