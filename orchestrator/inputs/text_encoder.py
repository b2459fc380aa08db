"""Text and chat messages to token ids, with the tokenizer of a folder.

Owns: which files a tokenizer's folder must hold, and the encoder of prompts and conversations. Plain text needs only
`tokenizers`; some chat templates load transformers.
"""

from collections.abc import Sequence
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonMapping, JsonObject, object_in
from slipstream.conf.schema import ModelConfig
from slipstream.rollout.errors import DataError, TokenizerError
from slipstream.rollout.text.chat_template import ChatTemplate
from slipstream.rollout.text.ends import end_token_ids
from slipstream.rollout.text.messages import Chat
from slipstream.rollout.text.plain_text import TOKENIZER_FILE, encode_open, encode_text, load_tokenizer
from slipstream.rollout.text.turns import TurnCheck

_OLDER_TOKENIZERS = ("tokenizer.model", "vocab.json")
"""What transformers converts to TOKENIZER_FILE."""
_CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def tokenizer_folder(model: ModelConfig) -> Path:
    """The folder that the options name; not for model.tokenizer=characters."""
    return Path(model.tokenizer or model.path or "")


def has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer's folder says how chat messages become text, in a place where transformers looks."""
    return any((folder / name).is_file() for name in _CHAT_TEMPLATE_FILES) or bool(
        _description(folder).get("chat_template")
    )


def template_knows_tools(folder: Path) -> bool:
    """Whether a chat template of a tokenizer's folder mentions tools at all; without a template, there are none."""
    written = [file.read_text(encoding="utf-8") for name in _CHAT_TEMPLATE_FILES if (file := folder / name).is_file()]
    return "tools" in str([*written, _description(folder).get("chat_template")])


def _description(folder: Path) -> JsonObject:
    """tokenizer_config.json; empty where there is none that can be read."""
    return object_in(folder / "tokenizer_config.json")


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
    """Text or chat messages to token ids, with a model's folder (model_folder.prepare_model)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._tokenizer = load_tokenizer(folder)
        except TokenizerError as error:
            raise ConfigError(
                f"{folder / TOKENIZER_FILE} is not a tokenizer ({error}); copy the model's own, whole"
            ) from error
        self._template = ChatTemplate(folder)
        self._turns = TurnCheck(self._template)
        self._has_template = has_chat_template(folder)
        ends = end_token_ids(folder, self._tokenizer)
        self.ends = {token: self._tokenizer.decode([token], skip_special_tokens=False) for token in ends}
        """Tokens at which a response ends, with their texts; the first is what ends an answer that is plain text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if add_special_tokens:
            return encode_open(self._tokenizer, text, self.ends)
        return encode_text(self._tokenizer, text, add_special_tokens)[0]

    def encode_with_places(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        return encode_text(self._tokenizer, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def require_chat_template(self) -> None:
        if not self._has_template:
            raise DataError(
                "rows are lists of chat messages, and the tokenizer has no chat template (chat_template.jinja, "
                "or chat_template in tokenizer_config.json); give plain text, or a tokenizer with a template: "
                "model.tokenizer=FOLDER"
            )

    def render(self, chat: Chat, *, is_open: bool) -> str:
        self.require_chat_template()
        self._template.check(chat)
        return self._template.render(chat.messages, is_open=is_open, tools=chat.tools, options=chat.options)

    def check_turns(self, chat: Chat, *, is_open: bool) -> None:
        """See TurnCheck.check; and tools and options that the template does not know."""
        self.require_chat_template()
        self._template.check(chat)
        self._turns.check(chat, is_open=is_open)

    def check_options(self, options: JsonMapping, name: str) -> None:
        """Refuse options that no template reads; messages call them `name`. Raises DataError."""
        if not self._has_template:
            raise DataError(
                f"{name} has no effect with a tokenizer that has no chat template; remove it, or give a tokenizer with "
                "a template: model.tokenizer=FOLDER"
            )
        self._template.check_options(options, name)
