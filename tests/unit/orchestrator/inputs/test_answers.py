"""Where an answer begins in what a template writes, and which templates could not be taught as they are asked."""

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.orchestrator.inputs.rows.answers import Answer, answer_of, num_shared
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.messages import Chat

Write = Callable[[Chat, bool], str]
OPEN = "[user]q<end>[assistant]"


class Template:
    """Writes each turn as [role]content<end>, and [assistant] before an answer.

    Args:
        begins: What the generation prompt has after that.
        turn: The text of a turn's content.
        whole: Changes the whole text.
    """

    def __init__(
        self,
        begins: str = "",
        turn: Callable[[dict[str, Any]], str] = lambda message: message["content"] or "",
        whole: Callable[[str, Chat, bool], str] = lambda text, chat, is_open: text,
    ) -> None:
        self.begins, self.turn, self.whole = begins, turn, whole

    def render(self, chat: Chat, *, is_open: bool) -> str:
        text = "".join(f"[{one['role']}]{self.turn(one)}<end>" for one in chat.messages)
        return self.whole(text + f"[assistant]{self.begins}" * is_open, chat, is_open)


def unthinking(message: dict[str, Any]) -> str:
    """A template that leaves thinking out."""
    return (message["content"] or "").rpartition("</think>")[2]


def chat_of(*turns: str, asked: str = "q", **fields: Any) -> Chat:
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    messages += [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(turns)]
    messages[-1] |= fields
    return Chat(messages)


def answer(template: Template, chat: Chat, number: int = 1) -> Answer:
    return answer_of(chat, number, "row 1", template)  # pyright: ignore[reportArgumentType]


def test_an_answer_is_what_the_template_writes_beyond_its_generation_prompt() -> None:
    chat = chat_of("4", "r", "6")
    assert answer(Template(), chat) == Answer(f"{OPEN}4<end>", len(OPEN))
    before = f"{OPEN}4<end>[user]r<end>[assistant]"
    assert answer(Template(), chat, 3) == Answer(f"{before}6<end>", len(before))
    thinks = chat_of("<think>hm</think>4")
    assert answer(Template(), thinks) == Answer(f"{OPEN}<think>hm</think>4<end>", len(OPEN)), "as it is written"
    calls = chat_of("", tool_calls=[{"name": "f"}])
    dict_of_last: Any = calls.messages[-1]
    dict_of_last["content"] = None
    assert answer(Template(), calls) == Answer(f"{OPEN}<end>", len(OPEN))


@pytest.mark.parametrize("asked", ["q", "hm"])
def test_thinking_that_the_template_leaves_out_is_taught_as_the_row_has_it(asked: str) -> None:
    """Also where the question has the same words."""
    opened = f"[user]{asked}<end>[assistant]"
    said = answer(Template(turn=unthinking), chat_of("<think>hm</think>4", asked=asked))
    assert said == Answer(f"{opened}<think>hm</think>4<end>", len(opened))


@pytest.mark.parametrize(
    ("content", "behind"),
    [
        ("<think>\nhm</think>4", "hm</think>4"),
        (" <think>hm</think>4", "hm</think>4"),
        ("hm</think>4", "hm</think>4"),
        (" hm</think>4", " hm</think>4"),
    ],
)
def test_a_thought_that_the_generation_prompt_begins_is_not_begun_twice(content: str, behind: str) -> None:
    opened = f"{OPEN}<think>\n"
    said = answer(Template("<think>\n", unthinking), chat_of(content))
    assert said == Answer(f"{opened}{behind}<end>", len(opened))


def test_an_answer_without_a_thought_begins_where_the_prompt_would_begin_one() -> None:
    said = answer(Template("<think>\n"), chat_of("4"))
    assert said == Answer(f"{OPEN}4<end>", len(OPEN), "<think>\n")
    alike = answer(Template("<think>\n"), chat_of("<table>"))
    assert alike.start == len(OPEN) and alike.unseen == "<think>\n", "however far the two texts are alike"
    begun = Template("<think>\n", lambda one: one["content"].replace("a", "<think>\na").replace("b", "<think>\nb"))
    assert answer(begun, chat_of("four")) == Answer(f"{OPEN}four<end>", len(OPEN), "<think>\n")


def with_fields(message: dict[str, Any]) -> str:
    return f"{message.get('reasoning') or ''}{message['content']}"


def test_thinking_in_a_field_must_be_written() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        with pytest.raises(DataError, match=rf"^row 1: turn 2 has thinking in its field '{name}', which the chat"):
            answer(Template(), chat_of("4", **{name: "hm"}))
    assert answer(Template(turn=with_fields), chat_of("4", reasoning=" hm ")).text == f"{OPEN} hm 4<end>"
    assert answer(Template(), chat_of("4", reasoning=None)).text == f"{OPEN}4<end>"
    stripping = Template(turn=lambda one: with_fields(one).strip())
    assert answer(stripping, chat_of("4", reasoning="\nhm")).text == f"{OPEN}hm4<end>"


def counted(text: str, chat: Chat, is_open: bool) -> str:
    """Writes what precedes an answer in another way once it is there."""
    return f"{sum(one['role'] == 'assistant' for one in chat.messages)} answers: {text}"


def ends_with_a_mark(text: str, chat: Chat, is_open: bool) -> str:
    return f"{text}!" if chat.messages[-1]["role"] == "user" and not is_open else text


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (Template(whole=counted), chat_of("4"), "turn 2: the chat template writes what precedes it in another way"),
        (
            Template("<think>", whole=ends_with_a_mark),
            chat_of("4"),
            "turn 2: the chat template writes what precedes it in another way once the answer is there",
        ),
        (
            Template(turn=lambda one: unthinking(one) * 2),
            chat_of("<think>hm</think>4"),
            "the chat template writes more of turn 2 than its content once",
        ),
        (
            Template(turn=unthinking),
            chat_of("<think>hm</think>", tool_calls=[{"name": "f"}]),
            "turn 2 thinks and calls tools, and the chat template leaves out the thinking",
        ),
    ],
)
def test_what_could_not_be_taught_as_it_is_asked_is_refused(template: Template, chat: Chat, message: str) -> None:
    with pytest.raises(DataError, match=f"^row 1: {message}"):
        answer(template, chat)


def test_a_common_beginning_ends_at_the_first_difference_or_with_the_shorter() -> None:
    pairs = (("xyz", "xya"), ("xy", "xya"), ("xyz", "xy"), ("", "x"), ("y", "x"), ("xy", "xy"))
    assert [num_shared(*pair) for pair in pairs] == [2, 2, 2, 0, 0, 2]
