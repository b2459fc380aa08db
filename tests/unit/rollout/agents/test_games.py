"""Locks: the games that ship give what they promise, whatever the answers; only numbers are worked out."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.rollout.agents.games import calculator, letters, lookup
from slipstream.rollout.agents.session import ChatReply


class Player:
    """A session whose model says these things, one after the other."""

    def __init__(self, *says: str | dict[str, Any]) -> None:
        self.says = list(says)
        self.heard: list[str] = []
        """The last message of each request."""

    async def chat(self, messages: Sequence[dict[str, Any]], tools: Any = None, **_: Any) -> ChatReply:
        self.heard.append(messages[-1]["content"])
        said = self.says.pop(0)
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        return ChatReply(message, "stop")


def calling(expression: str, name: str = "calculate") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"expression": expression})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("says", "reward", "heard"),
    [
        ("bdm", 1.0, ["4b7=", "d01=", "88m="]),
        ("xbd", 2 / 3, ["4b7=", "4b7=", "d01="]),
        ("447", 0.0, ["4b7=", "4b7=", "4b7="]),
    ],
)
async def test_letters_counts_right_answers_and_repeats_a_line(says: str, reward: float, heard: list[str]) -> None:
    player = Player(*says)
    task = {"prompt": "4b7=", "lines": ["4b7=", "d01=", "88m="]}
    assert await letters.play(task, player) == pytest.approx(reward)  # type: ignore[arg-type]
    assert player.heard == heard


@pytest.mark.parametrize(
    ("says", "reward", "heard"),
    [
        ("bdx", 1.0, ["4b7=", "d01=", "x88="]),
        ("bdb", 2 / 3, ["4b7=", "d01=", "x88="]),
        ("xbd", 2 / 3, ["4b7=", "4b7=", "d01="]),
        ("dbx", 1 / 3, ["4b7=", "4b7=", "d01="]),
    ],
)
async def test_lookup_answers_keys_in_their_order_alone(says: str, reward: float, heard: list[str]) -> None:
    player = Player(*says)
    task = {"prompt": "4b7=", "table": {"b": "d01=", "d": "x88="}, "answer": "x"}
    assert await lookup.follow(task, player) == pytest.approx(reward)  # type: ignore[arg-type]
    assert player.heard == heard


async def test_solve_calls_its_tool_and_compares_the_last_number() -> None:
    player = Player(calling("37 * 4 - 140"), "It is $8.")
    assert await calculator.solve({"prompt": "37 * 4 - 140?", "answer": 8}, player) == 1.0  # type: ignore[arg-type]
    assert player.heard == ["37 * 4 - 140?", "8"]
    player = Player(calling("1", name="search"), "9")
    assert await calculator.solve({"prompt": "8?", "answer": "8"}, player) == 0.0  # type: ignore[arg-type]
    assert player.heard[1] == "error: no tool search"
    assert await calculator.solve({"prompt": "8?", "answer": "8"}, Player(*[calling("1")] * 4)) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expression", "value"), [("2 * (3 + 4) - -1", "15"), ("1 / 4", "0.25"), ("1/0", "error: division by zero")]
)
def test_values_of_expressions(expression: str, value: str) -> None:
    assert calculator.calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["9 ** 9 ** 9", "__import__('os')", "'a' * 9", "(" * 150, "1" * 300, "", "x", "1;2"]
)
def test_nothing_else_is_evaluated(expression: str) -> None:
    assert calculator.calculate(expression).startswith("error: ")
