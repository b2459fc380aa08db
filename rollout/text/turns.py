"""Which turns a chat may have: their roles, their order, and that the chat template writes each where it stands.

    user, user                 a turn is missing, or was cut in two              refused
    ..., assistant, asked      the model would answer itself                     refused
    a role that is not known   templates write any word where the role stands    refused, unless the template names it
    system in the middle       some templates leave it out, or move it           refused where they do

Owns: these rules for rows. An agent may say what it likes in any order; a message that the template leaves out is
refused all the same.
"""

import itertools
from collections.abc import Sequence

from slipstream.conf.json_files import JsonMapping
from slipstream.rollout.errors import DataError, TemplateRefused
from slipstream.rollout.text.chat_template import ChatTemplate
from slipstream.rollout.text.messages import Chat

ROLES = ("system", "user", "assistant", "tool")
"""Known to every template that writes a message's role as it is. Others must be named by the template."""
OPENAI_ROLES = (*ROLES, "developer", "function")
"""Roles of OpenAI's protocol: a request may have them where the template writes them."""


class TurnCheck:
    """Checks chats against one template. Chats with the same roles are tried once."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._tried: set[object] = set()
        self._shown: set[tuple[str, bool]] = set()
        """Roles that the template was seen to write, at the beginning (True) or later."""

    def check(self, chat: Chat, *, is_open: bool) -> None:
        """Refuse turns that the model would be shown in another way than the row has them. `is_open`: an answer is
        asked for after the last message. Raises: DataError that names the message by its number, from 1;
        TemplateRefused."""
        roles = [str(message["role"]) for message in chat.messages]
        self._check_roles(roles)
        _check_order(roles, is_open)
        forms = tuple((role, _is_marked(message)) for role, message in zip(roles, chat.messages, strict=True))
        key = (forms, bool(chat.tools), repr(sorted(chat.options.items())), is_open)
        if key not in self._tried:
            self._check_written(chat, is_open, may_move=False)
            self._tried.add(key)

    def check_shown(self, chat: Chat) -> None:
        """Refuse a message of an agent's request whose role neither OpenAI's protocol nor the template names, or which
        the template leaves out. Raises: as check()."""
        roles = [str(message["role"]) for message in chat.messages]
        self._check_roles(roles, OPENAI_ROLES)
        asked = {(role, number == 0) for number, role in enumerate(roles) if role == "system" or role not in ROLES}
        if not asked <= self._shown:
            self._check_written(chat, is_open=True, may_move=True)
            self._shown |= asked

    def _check_roles(self, roles: Sequence[str], known: Sequence[str] = ROLES) -> None:
        for number, role in enumerate(roles, start=1):
            if role not in known and not self._template.names(role):
                raise DataError(
                    f"message {number} has the role {role!r}, which the model's chat template does not name; write it "
                    f"as one of {', '.join(ROLES)}"
                )

    def _check_written(self, chat: Chat, is_open: bool, *, may_move: bool) -> None:
        """Render the chat with a mark in place of each content, and look for the marks."""
        marks = {number: f"words {number:04d} end" for number, one in enumerate(chat.messages) if _is_marked(one)}
        marked = [{**one, "content": marks.get(number, one["content"])} for number, one in enumerate(chat.messages)]
        try:
            text = self._render(chat, marked, is_open)
        except TemplateRefused:  # its own words may be what the template needs
            self._render(chat, chat.messages, is_open)
            return
        num_leading = next((n for n, one in enumerate(chat.messages) if one["role"] != "system"), len(marks))
        last = -1
        for number, mark in marks.items():
            place = text.find(mark)
            is_moved = number >= num_leading and place < last  # Mistral's has the first system turn behind others
            if place < 0 or (is_moved and not may_move):
                what = "leaves it out" if place < 0 else "writes it before others that precede it"
                raise DataError(
                    f"message {number + 1} is of {chat.messages[number]['role']!r}, and the model's chat template "
                    f"{what} in this place, so that the model would not be given the messages as they are; move it, "
                    "or write it into a message of the user"
                )
            last = place if number >= num_leading else last

    def _render(self, chat: Chat, messages: Sequence[JsonMapping], is_open: bool) -> str:
        return self._template.render(messages, is_open=is_open, tools=chat.tools, options=chat.options)


def _is_marked(message: JsonMapping) -> bool:
    """Whether the template must write the content. Of earlier answers many leave out a part."""
    return bool(message["content"]) and message["role"] != "assistant"


def _check_order(roles: Sequence[str], is_open: bool) -> None:
    for number, (role, following) in enumerate(itertools.pairwise(roles), start=1):
        if role == following and role in ("user", "assistant"):
            raise DataError(
                f"messages {number} and {number + 1} are both of {role!r}, with no turn of the other side between "
                "them; write them as one message, or add the turn that is missing"
            )
    if is_open and roles[-1] == "assistant":
        raise DataError(
            f"message {len(roles)}, the last of the prompt, is of 'assistant', so that the model would be asked to "
            "answer itself; remove it (what a reward compares with belongs into a column of its own, such as answer)"
        )
