"""The model folder of a run: what engines and the prompt encoder read. Config and tokenizer, never weights.

Owns: `hf_config` (the one config that trainer and engines both see), generation_config.json, the character tokenizer.
Does not own: weights (version 0 comes by publish), nor which architectures exist in detail (trainer.model.spec).
Invariant: trainer and engines are built from the same config.json; no part of it is filled in by only one of them.
Needs `tokenizers`, not torch.

The character tokenizer (`model.tokenizer=characters`) has one token per character and four special tokens:

    0 <pad>   1 <bos>   2 <eos>   3 <unk>   4 space   5..30 a-z   31..40 0-9   41.. newline, punctuation, A-Z, the rest

cut after `vocab_size` entries, so a vocabulary of 64 holds lower case, digits and the first 23 of the punctuation. The
table is fixed: a character has the same id in every run. Text is prefixed with <bos> unless the caller says no.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from conf.errors import ConfigError
from conf.schema import DataConfig, DType, EngineFormat, Init, ModelConfig
from orchestrator.inputs.model_files import read_hf_config
from rollout.prompts import read_prompts
from rollout.types import Prompt
from trainer.architecture.families import check_spelling
from trainer.architecture.model_spec import ModelSpec
from trainer.weights.quantization import BlockFp8, engine_tensors
from weight_sync.layout import TensorMeta

CHARACTERS = "characters"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
ALPHABET = (
    " "
    + string.ascii_lowercase
    + string.digits
    + "\n=+-*/.,:;?!()<>[]'\"_#"
    + string.ascii_uppercase
    + "&|%$@^~{}\\`\t"
)
"""Printable ASCII, the characters that small tasks use first."""

TOKENIZER_FILE = "tokenizer.json"
"""What prompts and responses are read with, by `tokenizers`."""
_OLDER_TOKENIZERS = ("tokenizer.model", "vocab.json")
"""What transformers converts to TOKENIZER_FILE."""
_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Result of `prepare_model`."""

    folder: Path
    hf_config: dict[str, Any]
    """Content of config.json."""


def prepare_model(config: ModelConfig, folder: Path) -> PreparedModel:
    """Write config.json, generation_config.json and the tokenizer into `folder`.

    Raises:
        ConfigError: a file of model.path is missing or unreadable, model_type is unknown, or no tokenizer is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hf_config = resolve_hf_config(config)
    if config.tokenizer == CHARACTERS:
        save_character_tokenizer(folder, vocab_size=int(hf_config["vocab_size"]))
        for key, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
            hf_config[key] = token
    else:
        _copy_tokenizer(config, folder)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    source = Path(config.path) / "generation_config.json" if config.path else None
    if source is not None and source.is_file():
        shutil.copyfile(source, folder / "generation_config.json")
    else:
        special = {key: hf_config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in hf_config}
        (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    return PreparedModel(folder, hf_config)


def complete_export(model: Path, export: Path) -> None:
    """Put tokenizer and generation_config.json beside an exported model, which can then be served as it is.

    Args:
        model: What prepare_model() made.
        export: Holds config.json and weights.
    """
    for name in (*_TOKENIZER_FILES, "generation_config.json"):
        if (model / name).is_file():
            shutil.copyfile(model / name, export / name)


def resolve_hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of model.path, model.hf_config on top of it, and the format of the weights.

    Raises:
        ConfigError: config.json cannot be read or describes no known model, or a field of model.hf_config is misspelt.
    """
    base: dict[str, Any] = {}
    if config.path is not None:
        base = read_hf_config(Path(config.path), "model.path")
    overrides = config.hf_config if config.init is Init.random else {}
    merged = {**base, **overrides}
    check_spelling(merged, overrides)
    merged.setdefault("architectures", [ModelSpec.from_hf_config(merged).hf_architecture])
    merged["dtype"] = merged["torch_dtype"] = config.dtype.value
    if config.engine_format is EngineFormat.block_fp8 and not merged.get("quantization_config"):
        tensors = ModelSpec.from_hf_config(merged).checkpoint_tensors(config.dtype.value)
        merged["quantization_config"] = BlockFp8.hf_entry(tensors)
    return merged


def engine_checkpoint(hf_config: Mapping[str, Any], dtype: DType) -> list[TensorMeta]:
    """Every tensor that an engine of this model loads.

    Raises:
        ConfigError: an architecture or a quantization that cannot be published.
    """
    tensors = ModelSpec.from_hf_config(dict(hf_config)).checkpoint_tensors(dtype.value)
    return engine_tensors(tensors, BlockFp8.from_hf_config(hf_config))


def check_character_vocabulary(vocab_size: int) -> None:
    """Raise ConfigError unless there is room for the special tokens and one character."""
    fewest = len(SPECIAL_TOKENS) + 1
    if vocab_size < fewest:
        raise ConfigError(f"model.tokenizer=characters needs model.hf_config.vocab_size >= {fewest}, got {vocab_size}")


def save_character_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """Write the character tokenizer, in the format that `tokenizers`, transformers and vLLM all read."""
    check_character_vocabulary(vocab_size)
    entries = [*SPECIAL_TOKENS, *ALPHABET][:vocab_size]
    pad, bos, eos, unk = SPECIAL_TOKENS
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(entries)}, unk_token=unk))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(description, indent=2) + "\n")


def has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer's folder says how chat messages become text, in a place where transformers looks."""
    if any((folder / name).is_file() for name in _CHAT_TEMPLATE_FILES):
        return True
    try:
        description = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(description, dict) and bool(description.get("chat_template"))


def check_holds_tokenizer(option: str, folder: Path) -> None:
    """Raise ConfigError unless the folder has tokenizer.json: prompts, responses and offsets are read with it alone."""
    if (folder / TOKENIZER_FILE).is_file():
        return
    older = [name for name in _OLDER_TOKENIZERS if (folder / name).is_file()]
    if older:
        raise ConfigError(
            f"{option}={folder} has {older[0]} and no {TOKENIZER_FILE}, which responses are made text with; convert it "
            "with transformers: AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)"
        )
    raise ConfigError(f"{option}={folder} holds no {TOKENIZER_FILE}; give model.tokenizer=FOLDER")


class TextEncoder:
    """Text or chat messages to token ids. Plain text needs only `tokenizers`; chat templates load transformers.

    Args:
        folder: With tokenizer.json (check_holds_tokenizer).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # the only class that `tokenizers` raises
            raise ConfigError(
                f"{folder / TOKENIZER_FILE} is not a tokenizer ({error}); copy the model's own, whole"
            ) from error
        self._templates: Any = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Chat messages as the model sees them, ending where its answer begins."""
        return str(self._transformers().apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

    @property
    def end_of_text(self) -> str:
        """The end-of-sequence token's text; empty when the tokenizer has none."""
        try:
            described = json.loads((self._folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        token = described.get("eos_token") or ""
        return str(token.get("content", "")) if isinstance(token, dict) else str(token)

    def encode_with_places(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """(token ids, place of each token's first character in `text`; -1 for a special token that was added)."""
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        places = [-1 if first == last else first for first, last in encoded.offsets]
        return encoded.ids, places

    def render_messages(self, messages: Sequence[dict[str, Any]], *, is_open: bool) -> str:
        """The chat template's text; `is_open` adds what precedes an assistant's answer."""
        template = self._transformers().apply_chat_template
        return str(template(list(messages), tokenize=False, add_generation_prompt=is_open))

    def _transformers(self) -> Any:
        if self._templates is None:
            from transformers import AutoTokenizer

            self._templates = AutoTokenizer.from_pretrained(self._folder)
        return self._templates


def read_all_prompts(config: DataConfig, encoder: TextEncoder) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts; the second list is empty without data.eval_path."""
    if config.path is None:
        raise ConfigError("data.path is required; give a .jsonl or .parquet file, or data=letters")
    training, held_out = (
        read_prompts(
            path,
            encoder,
            prompt_key=config.prompt_key,
            max_prompt_tokens=config.max_prompt_tokens,
            add_special_tokens=config.add_special_tokens,
        )
        if path is not None
        else []
        for path in (config.path, config.eval_path)
    )
    return training, held_out


def _copy_tokenizer(config: ModelConfig, folder: Path) -> None:
    source = Path(config.tokenizer or config.path or "")
    if not (config.tokenizer or config.path):
        raise ConfigError("model.tokenizer is required when model.path is null; give a folder, or `characters`")
    check_holds_tokenizer("model.tokenizer" if config.tokenizer else "model.path", source)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
