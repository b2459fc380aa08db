"""Rows of data.path and data.eval_path: read as the run will read them, and checked before it starts.

    file --rollout.prompts / conversations--> token ids --checks--> one Fact, or one DataError that names the row

Owns: rules between a row and the run's other options. Does not own: files and their format (rollout/prompts.py), which
tokens of a conversation count (conversations.py). No transformers, no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.schema import Objective, RunConfig
from orchestrator.inputs.character_tokenizer import (
    ALPHABET,
    CHARACTERS,
    SPECIAL_TOKENS,
    known_characters,
    save_character_tokenizer,
)
from orchestrator.inputs.conversations import Conversation, read_conversations
from orchestrator.inputs.facts import Fact
from orchestrator.inputs.model_folder import resolve_hf_config
from orchestrator.inputs.text_encoder import TextEncoder, has_chat_template, tokenizer_folder
from rollout.errors import DataError
from rollout.prompts import Encoder, encode_up_to, read_prompts
from rollout.rewards.runner import chosen_rewards
from rollout.types import Prompt


def read_all_prompts(config: RunConfig, encoder: Encoder) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts; the second list is empty without data.eval_path."""
    assert config.data.path is not None  # conf.checks
    training, held_out = (
        read_prompts(
            path,
            encoder,
            prompt_key=config.data.prompt_key,
            max_prompt_tokens=config.max_prompt_tokens,
            add_special_tokens=config.data.add_special_tokens,
        )
        if path is not None
        else []
        for path in (config.data.path, config.data.eval_path)
    )
    return training, held_out


def check_data(config: RunConfig) -> Fact:
    """Every row of both files can be read and is short enough; prompts have the column that the reward reads."""
    is_sft = config.algorithm.objective is Objective.sft
    subject = "conversations" if is_sft else "prompts"
    try:
        encoder = RowEncoder(config)
    except ConfigError:
        return Fact(subject, "not read")  # other checks report what is wrong with the model or the tokenizer
    data = config.data
    paths = [path for path in (data.path, data.eval_path) if path is not None]
    if is_sft:
        files: list[Sequence[Prompt | Conversation]] = [read_conversations(path, encoder, data) for path in paths]
        warning = ""
    else:
        training, held_out = read_all_prompts(config, encoder)
        files = [training, held_out]
        for path, prompts in zip(paths, (training, held_out), strict=False):
            _check_answer_column(config, path, prompts)
        warning = _answers_out_of_reach(config, training, encoder)
    for path, rows in zip(paths, files, strict=False):
        _check_vocabulary(config, path, rows)
    counts = ", held-out ".join(f"{len(rows)} in {path}" for path, rows in zip(paths, files, strict=False))
    return Fact(subject, f"{counts}{warning}", is_warning=bool(warning))


def _check_answer_column(config: RunConfig, path: str, prompts: Sequence[Prompt]) -> None:
    """The rewards that ship read columns; a function gets them all. A row may name the rewards that judge it."""
    reward = config.reward
    parts = reward.by_name
    for prompt in prompts:
        for name in chosen_rewards(reward, prompt, path):
            for option, column in parts[name].columns.items():
                if column not in prompt.fields:
                    section = reward.section_of(name)
                    raise DataError(
                        f"{path}: row {prompt.prompt_id + 1} has no column {column!r} for {section}.kind="
                        f"{parts[name].kind}; its other columns are {', '.join(prompt.fields) or 'none'}; set "
                        f"{section}.{option}"
                    )


def _answers_out_of_reach(config: RunConfig, prompts: Sequence[Prompt], encoder: RowEncoder) -> str:
    """What to say of answers that no response can equal, being longer or, without an end of sequence, shorter."""
    sampling = config.rollout.sampling
    if config.reward.parts or config.reward.kind != "exact_match":
        return ""
    found: list[tuple[Prompt, int]] = []
    for prompt in prompts:
        answer = str(prompt.fields[config.reward.answer_key]).strip()
        token_ids, _ = encode_up_to(sampling.max_tokens, answer, partial(encoder.encode, add_special_tokens=False))
        if len(token_ids) > sampling.max_tokens or (not sampling.stop_at_eos and len(token_ids) < sampling.max_tokens):
            found.append((prompt, len(token_ids)))
    if not found:
        return ""
    prompt, num_tokens = found[0]
    have, cure = "at most", "raise it"
    if not sampling.stop_at_eos:
        have, cure = "exactly", "set it to that, or set rollout.sampling.stop_at_eos=true, which ends them earlier"
    return (
        f"; reward.kind=exact_match can hardly be 1 for {len(found)} of {len(prompts)} rows: responses have {have} "
        f"rollout.sampling.max_tokens={sampling.max_tokens} tokens, and the answer of row {prompt.prompt_id + 1} has "
        f"{num_tokens if num_tokens <= sampling.max_tokens else 'more'}; {cure}"
    )


def _check_vocabulary(config: RunConfig, path: str, rows: Sequence[Prompt | Conversation]) -> None:
    """The tokenizer's ids are rows of the model's embedding: another one would end the engine with a device error. The
    character tokenizer has no token for most of Unicode, and a model learns nothing from <unk>.
    """
    vocab_size = int(resolve_hf_config(config.model)["vocab_size"])
    for number, row in enumerate(rows, start=1):
        if max(row.token_ids) >= vocab_size:
            raise DataError(
                f"{path}: the tokenizer makes token {max(row.token_ids)} of row {number}, and the model has "
                f"vocab_size={vocab_size}; give the model's own tokenizer (model.tokenizer), or a larger "
                "model.hf_config.vocab_size"
            )
        if config.model.tokenizer == CHARACTERS and SPECIAL_TOKENS.index("<unk>") in row.token_ids:
            text = row.text if isinstance(row, Prompt) else ""
            unknown = "".join(sorted(set(text) - known_characters(vocab_size))[:5])
            raise DataError(
                f"{path}: row {number} has characters{f' ({unknown!r})' if unknown else ''} without a token in "
                f"model.tokenizer=characters with model.hf_config.vocab_size={vocab_size}; leave them out, set "
                f"model.hf_config.vocab_size={len(SPECIAL_TOKENS) + len(ALPHABET)} (printable ASCII), or give another "
                "model.tokenizer"
            )


class RowEncoder:
    """Tokenizes plain text as the run will. Chat messages are joined instead of rendered: their template needs
    transformers, which take seconds to load; the run counts their tokens exactly before it starts Ray.
    """

    def __init__(self, config: RunConfig) -> None:
        model = config.model
        self._has_chat_template = model.tokenizer == CHARACTERS or has_chat_template(tokenizer_folder(model))
        if model.tokenizer != CHARACTERS:
            self._text = TextEncoder(tokenizer_folder(model))
            return
        with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
            save_character_tokenizer(Path(folder), vocab_size=int(resolve_hf_config(model)["vocab_size"]))
            self._text = TextEncoder(Path(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text."""
        return self._text.encode(text, add_special_tokens)

    @property
    def end_of_text(self) -> str:
        """The end-of-sequence token's text."""
        return self._text.end_of_text

    def encode_with_places(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """As TextEncoder.encode_with_places."""
        return self._text.encode_with_places(text, add_special_tokens)

    def render_messages(self, messages: Sequence[dict[str, Any]], *, is_open: bool) -> str:
        """About what the chat template makes of the messages."""
        self._require_chat_template()
        return "".join(f"{message['role']}\n{message['content']}\n" for message in messages)

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """About what the chat template makes of the messages, at least their text."""
        self._require_chat_template()
        return "\n".join(str(message["content"]) for message in messages)

    def _require_chat_template(self) -> None:
        if not self._has_chat_template:
            raise DataError(
                "rows are lists of chat messages, and the tokenizer has no chat template (chat_template.jinja, "
                "or chat_template in tokenizer_config.json); give plain text, or a tokenizer with a template: "
                "model.tokenizer=FOLDER"
            )
