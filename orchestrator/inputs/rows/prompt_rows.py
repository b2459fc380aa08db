"""Rows of data.path (or data.sources) and of held-out sets: read as the run will read them, checked before it starts.

    row --prompts / conversations / preferences--> token ids --checks--> one Fact, or one DataError that names the row

Owns: rules between a row and the run's other options. No transformers, no torch.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.schema import ANSWER, READ_AN_ANSWER, Objective, Order, RunConfig
from slipstream.orchestrator.data.curriculum import Middling
from slipstream.orchestrator.data.prompts import Encoder, PromptReader, check_text, encode_up_to
from slipstream.orchestrator.data.sources import HUB, Row, listed, read_rows
from slipstream.orchestrator.data.streams import Stream
from slipstream.orchestrator.data.training_stream import Read, held_out_items, training_items, training_stream
from slipstream.orchestrator.files.run_folder import RunFolder, resumed_folder
from slipstream.orchestrator.inputs.character_tokenizer import ALPHABET, CHARACTERS, SPECIAL_TOKENS, known_characters
from slipstream.orchestrator.inputs.facts import Fact
from slipstream.orchestrator.inputs.model_folder import prepare_model, resolve_hf_config
from slipstream.orchestrator.inputs.resumed import check_rows_go_on
from slipstream.orchestrator.inputs.rows.answers import THOUGHT_ENDS, THOUGHT_FIELDS
from slipstream.orchestrator.inputs.rows.conversations import ConversationReader, Lesson
from slipstream.orchestrator.inputs.rows.preferences import PreferenceReader
from slipstream.orchestrator.inputs.rows.shown_row import shown_row, thoughts_not_given
from slipstream.orchestrator.inputs.rows.turn_ends import unknown_end
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.errors import DataError
from slipstream.rollout.rewards.answer_text import answer_text
from slipstream.rollout.rewards.code_tests import cases_of
from slipstream.rollout.rewards.judge_prompt import columns_needed
from slipstream.rollout.rewards.runner import chosen_rewards
from slipstream.rollout.text.messages import Chat
from slipstream.rollout.types import Prompt

RENDERED_ROWS = 256
"""Rows of each source that go through the chat template before a run starts. The run itself reads all rows so."""


class PromptRows:
    """The prompts of a run: each row read, tokenized, and checked against the run's other options. All methods raise
    DataError, with the row's place."""

    def __init__(self, config: RunConfig, encoder: Encoder) -> None:
        self._config = config
        reward = config.reward
        self._parts = reward.by_name
        self._needed = {name: columns_needed(part, reward.section_of(name)) for name, part in self._parts.items()}
        self._vocab_size = int(resolve_hf_config(config.model)["vocab_size"])
        self._reader = PromptReader(
            data=config.data,
            encoder=encoder,
            max_prompt_tokens=config.max_prompt_tokens,
            is_for_agent=config.rollout.agent is not None,
        )

    @property
    def left_out(self) -> Mapping[str, str]:
        """Columns that nobody is given, and the type that JSON cannot hold."""
        return self._reader.left_out

    def read(self, row: Row, prompt_id: int) -> Prompt:
        prompt = self._reader.prompt(row, prompt_id)
        if self._config.rollout.agent is None:  # an agent may judge its episodes itself
            self._check_columns(row.where, prompt)
        check_vocabulary(self._config, self._vocab_size, row.where, prompt.token_ids, prompt.text)
        return prompt

    def _check_columns(self, where: str, prompt: Prompt) -> None:
        """The rewards that ship read columns; a function gets them all. A row may name the rewards that judge it."""
        reward = self._config.reward
        for name in chosen_rewards(reward, prompt, where):
            for option, column in self._needed[name]:
                section, kind = reward.section_of(name), self._parts[name].kind
                if column not in prompt.fields:
                    if column in self.left_out:
                        raise DataError(
                            f"{where}: column {column!r} ({section}.kind={kind}) holds {self.left_out[column]}; write "
                            "it as text"
                        )
                    has = f"its other columns are {listed(prompt.fields)}; set "
                    cure = (f"{section}.{option}, or " if option else "") + f"data.columns.{column}=COLUMN"
                    if not prompt.fields:
                        has, cure = "the row has no others; ", f"add it, or set {section}.kind=FILE.py:function"
                    if self._config.algorithm.advantage == "none":
                        cure += ", or reward=none, as algorithm.advantage=none learns from no reward"
                    raise DataError(f"{where}: no column {column!r} for {section}.kind={kind}; {has}{cure}")
                told = f"{where}: column {column!r} ({section}.kind={kind})"
                if kind in READ_AN_ANSWER:
                    _check_answer(prompt.fields[column], told)
                elif kind == "code":
                    _check_tests(prompt.fields[column], told)

    def training(self) -> list[Prompt]:
        """Training prompts, source after source; with data.stream the first ones of each."""
        data = self._config.data
        sources = [training_items(data, index, self.read) for index in range(len(data.training_sources))]
        return [prompt for items in sources for prompt in items.found]

    def held_out(self) -> dict[str, list[Prompt]]:
        """Held-out prompts of every set, by its name; "" is data.eval_path's."""
        return {name: items.found for name, items in held_out_items(self._config.data, self.read).items()}

    def stream(self) -> Stream[Prompt]:
        data, order = self._config.data, None
        if data.order is Order.middling:
            order = partial(Middling, floor=data.curriculum_floor)
        return training_stream(data, self.read, seed=self._config.run.seed, order=order)


def _check_answer(answer: object, what: str) -> None:
    """An answer is compared as text: that of null is None, which a response may say."""
    try:
        text = answer_text(answer)
    except ValueError as e:
        got = "null" if answer is None else json.dumps(answer)[:60]
        raise DataError(
            f"{what} must be text or a number, got {got}; write the answer as text, or remove the row"
        ) from e
    check_text(text, what)


def _check_tests(tests: object, what: str) -> None:
    try:
        cases_of(tests)
    except ValueError as e:
        raise DataError(
            f"{what}: {e}; write the tests in one of the forms of docs/rewards.md, or remove the row"
        ) from e


def check_data(config: RunConfig) -> Fact:
    """Every row of all sources can be read and is short enough; prompts have the column that the reward reads. With
    data.stream only the first rows of the training sources are read. The first RENDERED_ROWS of each source go through
    the chat template, as in the run."""
    objective = config.algorithm.objective
    subject = {Objective.policy: "prompts", Objective.sft: "conversations", Objective.dpo: "pairs"}[objective]
    try:
        encoder = RowEncoder(config)
    except ConfigError:  # other checks report what is wrong with the model or the tokenizer
        for source in config.data.training_sources:
            if not source.startswith(HUB):
                read_rows(source, option="data.sources" if config.data.sources else "data.path")
        return Fact(subject, "not read")
    check_ends(config, encoder.ends)
    if config.data.chat_template_kwargs:
        encoder.exact.check_options(config.data.chat_template_kwargs, "data.chat_template_kwargs")
    data, warnings, seen = config.data, list[str](), list[tuple[str, Any]]()
    items = partial(training_items, verb="checking")
    if objective is not Objective.policy:
        vocab_size = int(resolve_hf_config(config.model)["vocab_size"])
        check = partial(check_vocabulary, config, vocab_size)
        read = _rendering_the_first(
            lesson_reader(config, encoder.exact, check), lesson_reader(config, encoder, check), seen
        )
        training = [items(data, index, read) for index in range(len(data.training_sources))]
        held_out = held_out_items(data, read, "checking")
        warnings += thoughts_not_given([lesson for _, lesson in seen])
        has_chats = any(_teaches_no_end(lesson, encoder.ends) for _, lesson in seen)
    else:
        of_prompts, quick_ones = (PromptRows(config, one) for one in (encoder.exact, encoder))
        read = _rendering_the_first(of_prompts.read, quick_ones.read, seen)
        training = [items(data, index, read) for index in range(len(data.training_sources))]
        held_out = held_out_items(data, read, "checking")
        found = [prompt for of_source in training for prompt in of_source.found]
        if left_out := {**of_prompts.left_out, **quick_ones.left_out}:
            named = ", ".join(f"{column} ({kind})" for column, kind in left_out.items())
            warnings.append(f"columns that neither rewards nor agents get, because JSON cannot hold them: {named}")
        warnings += _answers_out_of_reach(config, found, encoder)
        has_chats = any(prompt.messages is not None for prompt in found)
    is_exact = not (data.stream or encoder.has_estimated)
    check_rows_go_on(config, training if is_exact else None)
    warnings += _answers_end_elsewhere(config, encoder.exact) if has_chats else []
    num_rows = sum(len(of_source.found) for of_source in training)
    name, taken = _taken_by_a_step(config)
    if config.run.num_steps and not data.stream and num_rows < taken:
        warnings.append(f"fewer than a step takes, so that each is drawn more than once: algorithm.{name}={taken}")
    what = "the first " if data.stream else ""
    parts = [f"{what}{num} in {source}" for num, source in zip(training, data.training_sources, strict=True)]
    for name, source in data.held_out_sources.items():
        is_trained = config.run.num_steps > 0 and source in data.training_sources
        trained = ", which is trained on as well" if is_trained else ""
        parts.append(f"held-out {held_out[name]} in {source}{trained}")
    bound = f"; the chat template was tried on the first {RENDERED_ROWS} rows of each" if encoder.has_estimated else ""
    if config.run.resume is not None and not is_exact:
        bound += "; whether they are those that the run began with is seen once the run has read them"
    shown = (Fact(f"first {subject[:-1]}", f"{seen[0][0]}, {shown_row(seen[0][1], encoder.exact)}"),) if seen else ()
    finding = "; ".join([", ".join(parts) + bound, *warnings])
    return Fact(subject, finding, is_warning=bool(warnings), also=(*shown, *_epochs(config, num_rows)))


def _taken_by_a_step(config: RunConfig) -> tuple[str, int]:
    """The option of section algorithm that says how many rows a step takes, and its value."""
    name = "groups_per_step" if config.algorithm.objective is Objective.policy else "sequences_per_step"
    return name, getattr(config.algorithm, name)


def _epochs(config: RunConfig, num_rows: int) -> list[Fact]:
    """How often the run goes through its rows; empty where it does not take them in order."""
    data, steps = config.data, num_rows / _taken_by_a_step(config)[1]
    if (
        0 in (config.run.num_steps, num_rows)
        or data.stream
        or data.order is Order.middling
        or len(data.training_sources) > 1
    ):
        return []
    drops = config.algorithm.objective is Objective.policy and config.algorithm.drop_zero_variance_groups
    return [Fact("epochs", f"{'at least ' if drops else ''}{config.run.num_steps / steps:.1f}, of {steps:,.1f} steps")]


def _rendering_the_first(exact: Read[Any], quick: Read[Any], seen: list[tuple[str, Any]]) -> Read[Any]:
    """Reads the first RENDERED_ROWS of a source as the run will, and notes them with their places; others quickly."""

    def read(row: Row, number: int) -> Any:
        if row.after.num_rows > RENDERED_ROWS:
            return quick(row, number)
        item = exact(row, number)
        seen.append((row.where, item))
        return item

    return read


def first_prompts(config: RunConfig, *, most_rows: int) -> list[Prompt]:
    """Prompts of the first rows of each training source; none where they cannot be read, which check_data reports."""
    sources = range(len(config.data.training_sources))
    try:
        read = PromptRows(config, RowEncoder(config)).read
        items = [training_items(config.data, index, read, most_rows) for index in sources]
    except SlipstreamError:
        return []
    return [prompt for of_source in items for prompt in of_source.found]


def check_ends(config: RunConfig, ends: Mapping[int, str]) -> None:
    """Refuse a model of which nothing says where its responses end: neither `ends`, what its files call so, nor an
    option."""
    sampling = config.rollout.sampling
    is_sampled = config.algorithm.objective is Objective.policy
    if ends or (is_sampled and (sampling.stop or sampling.stop_token_ids or not sampling.stop_at_eos)):
        return
    what = "no response would end before rollout.sampling.max_tokens"
    cure = "set rollout.sampling.stop_token_ids=[ID] to the token that ends one, or rollout.sampling.stop_at_eos=false"
    if not is_sampled:
        what = "no answer would teach the model to end"
        cure = "give model.tokenizer=FOLDER, whose tokenizer_config.json names eos_token"
    raise ConfigError(
        "no file of the model names a token that ends a response: eos_token_id of generation_config.json and "
        f"config.json, or eos_token of tokenizer_config.json; {what}; {cure}"
    )


def _teaches_no_end(lesson: Lesson, ends: Mapping[int, str]) -> bool:
    """Whether an answer has no token that ends a response."""
    samples = itertools.chain.from_iterable(lesson.samples(policy_version=0))
    return any(ends.keys().isdisjoint(one.token_ids[one.loss_mask].tolist()) for one in samples)


def _answers_end_elsewhere(config: RunConfig, encoder: TextEncoder) -> list[str]:
    """What to say of a chat template whose answers end at no token at which responses do: a base model's, often."""
    sampling, is_sampled = config.rollout.sampling, config.algorithm.objective is Objective.policy
    end = unknown_end(encoder)
    if end is None or (
        is_sampled and (not end or not sampling.stop_at_eos or any(stop in end for stop in sampling.stop))
    ):
        return []
    if not end:
        return ["the chat template writes nothing after an answer, so that no answer teaches the model to end"]
    token_ids = encoder.encode(end, add_special_tokens=False)
    if is_sampled and set(token_ids) & set(sampling.stop_token_ids):
        return []
    cure = f"rollout.sampling.stop_token_ids=[{token_ids[0]}]" if len(token_ids) == 1 else "rollout.sampling.stop"
    cure = f"set {cure}" if is_sampled else f"rollouts of it need {cure}"
    return [
        f"the chat template ends an answer with {end!r}, which no file of the model calls an end "
        f"({', '.join(encoder.ends.values())}): responses go on after it; {cure}, or name it by eos_token"
    ]


def lesson_reader(
    config: RunConfig, encoder: Encoder, check: Callable[[str, Sequence[int]], None] = lambda where, token_ids: None
) -> Callable[[Row, int], Lesson]:
    if config.algorithm.objective is Objective.dpo:
        return PreferenceReader(config.data, encoder, check).read
    return ConversationReader(config.data, encoder, check).read


def _answers_out_of_reach(config: RunConfig, prompts: Sequence[Prompt], encoder: RowEncoder) -> list[str]:
    """What to say of answers that no response can equal, being longer or, without an end of sequence, shorter."""
    sampling = config.rollout.sampling
    if config.reward.parts or config.reward.kind != "exact_match" or config.rollout.agent is not None:
        return []
    found: list[tuple[Prompt, int]] = []
    for prompt in prompts:
        answer = answer_text(prompt.fields[ANSWER])
        token_ids, _ = encode_up_to(sampling.max_tokens, answer, partial(encoder.encode, add_special_tokens=False))
        if len(token_ids) > sampling.max_tokens or (
            not sampling.can_end_early and len(token_ids) < sampling.max_tokens
        ):
            found.append((prompt, len(token_ids)))
    if not found:
        return []
    prompt, num_tokens = found[0]
    row = prompt.prompt_id // len(config.data.training_sources) + 1
    have, cure = "at most", "raise it"
    if not sampling.can_end_early:
        have, cure = "exactly", "set rollout.sampling.stop_at_eos=true, which ends them earlier"
        if num_tokens:
            cure = f"set it to that, or {cure}"
    return [
        f"reward.kind=exact_match can hardly be 1 for {len(found)} of {len(prompts)} rows: responses have {have} "
        f"rollout.sampling.max_tokens={sampling.max_tokens} tokens, and the answer of row {row} has "
        f"{num_tokens if num_tokens <= sampling.max_tokens else 'more'}; {cure}"
    ]


def check_vocabulary(config: RunConfig, vocab_size: int, where: str, token_ids: Sequence[int], text: str = "") -> None:
    """The tokenizer's ids are rows of the model's embedding: another one would end the engine with a device error. The
    character tokenizer has no token for most of Unicode, and a model learns nothing from <unk>."""
    if max(token_ids) >= vocab_size:
        raise DataError(
            f"{where}: the tokenizer makes token {max(token_ids)}, and the model has vocab_size={vocab_size}; give the "
            "model's own tokenizer (model.tokenizer), or a larger model.hf_config.vocab_size"
        )
    if config.model.tokenizer == CHARACTERS and SPECIAL_TOKENS.index("<unk>") in token_ids:
        unknown = "".join(sorted(set(text) - known_characters(vocab_size))[:5])
        raise DataError(
            f"{where}: characters{f' ({unknown!r})' if unknown else ''} without a token in model.tokenizer=characters "
            f"with model.hf_config.vocab_size={vocab_size}; leave them out, set "
            f"model.hf_config.vocab_size={len(SPECIAL_TOKENS) + len(ALPHABET)} (printable ASCII), or give another "
            "model.tokenizer"
        )


class RowEncoder:
    """Tokenizes plain text as the run will. Chat messages are joined instead of rendered: templates take time with many
    rows. `exact` renders them, as long as this object lives; the run renders all."""

    def __init__(self, config: RunConfig) -> None:
        model = config.model
        folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.has_estimated = False
        began = None if (resumed := resumed_folder(config.run)) is None else RunFolder(resumed.resolve()).began
        self.exact = exact = TextEncoder(prepare_model(model, folder, began).folder)
        self.ends, self.encode, self.encode_with_places = exact.ends, exact.encode, exact.encode_with_places
        self.check_turns = exact.check_turns  # chats with the same roles go through the template once

    def render(self, chat: Chat, *, is_open: bool) -> str:
        """About what the chat template makes of the chat, at least its text. Templates leave out earlier thinking."""
        self.exact.require_chat_template()
        self.has_estimated = True
        parts = [json.dumps(chat.tools, default=str)] if chat.tools else []
        for number, message in enumerate(chat.messages, start=1):
            content = str(message["content"] or "")
            if number == len(chat.messages):
                content += "".join(str(message.get(name) or "") for name in THOUGHT_FIELDS)
            elif message["role"] == "assistant":
                content = content.rpartition(THOUGHT_ENDS)[2]
            parts.append(f"{message['role']}\n{content}\n")
        return "".join(parts)
