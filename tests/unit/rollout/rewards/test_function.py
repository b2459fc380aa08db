"""How a reward's configuration becomes a function: which kind it is, and what cannot be called is refused."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.conf.schema import RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards.function import BESIDE, INSTEAD, Form, load_reward
from slipstream.rollout.rewards.runner import RewardRunner, _fields, chosen_rewards
from slipstream.rollout.types import Prompt

OWN = """
def one(prompt, response, fields): return 1.0
async def soon(prompt, response, fields): return 1.0
def group(prompt, responses, fields): return [1.0 for _ in responses]
async def group_soon(prompt, responses, fields): return [1.0 for _ in responses]
def more(prompt, response, fields, scale=2.0, *, other=3): return scale
def two(prompt, response): return 1.0
def four(prompt, response, fields, needed): return 1.0
def verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def trl(completions, **columns): return 1.0
def late(prompt, response, fields, completions=None): return 1.0
class Callable:
    def __call__(self, prompt, response, fields): return 1.0
made = Callable()
class Awaited:
    async def __call__(self, prompt, responses, fields): return [1.0 for _ in responses]
awaited = Awaited()
def yields(prompt, response, fields): yield 1.0
async def yields_soon(prompt, response, fields): yield 1.0
def first(messages, response, fields): return messages
def second(prompt, messages, fields): return messages
def third(prompt, response, messages): return messages["a"]
def further(prompt, response, fields, messages): return messages
def named(prompt, *rest, messages): return messages
def some(prompt, response, fields, *messages): return len(messages)
class Built:
    def __init__(self, prompt, response, fields): ...
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own_rewards.py").write_text(OWN)
    return tmp_path / "own_rewards.py"


@pytest.mark.parametrize(
    ("name", "is_async", "is_of_group"),
    [
        ("one", False, False), ("soon", True, False), ("group", False, True), ("group_soon", True, True),
        ("more", False, False), ("late", False, False), ("made", False, False), ("awaited", True, True),
    ],
)  # fmt: skip
def test_a_function_says_by_its_form_how_it_is_called(own: Path, name: str, is_async: bool, is_of_group: bool) -> None:
    reward = load_reward(RewardConfig(kind=f"{own}:{name}"))
    assert reward.form == Form(is_async, is_of_group, str(own))


@pytest.mark.parametrize(
    ("name", "asks", "worth"),
    [
        ("first", INSTEAD, "asked"), ("further", BESIDE, "asked"), ("named", BESIDE, "asked"),
        ("second", "", "r"), ("third", "", 1), ("some", "", 0),
    ],
)  # fmt: skip
def test_messages_are_given_where_a_parameter_of_that_name_is_no_response_and_no_fields(
    own: Path, name: str, asks: str, worth: object
) -> None:
    reward = load_reward(RewardConfig(kind=f"{own}:{name}"))
    assert (reward.form.messages, reward.call("p", ["r"], {"a": 1}, "asked")) == (asks, worth)


def test_what_ships_is_a_reward_too() -> None:

    fields = {"answer": " 4"}
    exact = load_reward(RewardConfig(kind="exact_match"))
    with pytest.raises(KeyError, match=r"the row has no column 'answer' \(data.columns.answer\); it has b"):
        exact.function("p", "4", {"b": 1})
    regex = load_reward(RewardConfig(kind="regex", pattern=r"is (\d+)|none()"))
    assert regex.function("p", "it is 4, is 5", fields) == (1.0, "4")
    assert regex.function("p", "none", fields) == (0.0, "") and regex.function("p", "4", fields) == (0.0, None)
    group = load_reward(RewardConfig(kind="slipstream.rollout.rewards.examples:share_of_answer"))
    assert not group.form.is_of_group and group.function("p", "ee 3e", {"answer": "e"}) == 0.75
    assert group.function("p", "", {"answer": "e"}) == 0.0
    for pattern, said in (("(", r"^reward\.pattern='\(' is not a regular expression"), ("a", "has no group")):
        with pytest.raises(RewardError, match=said):
            load_reward(RewardConfig(kind="regex", pattern=pattern))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two", "'two' must take .*too many positional arguments"),
        ("four", "'four' must take .*missing a required argument: 'needed'"),
        ("verl", "'verl' must take .*but takes data_source, solution_str, ground_truth, as rewards of another library"),
        ("trl", r"'trl' must take .*but takes completions, as rewards of another library do.*coming_from\.md"),
        ("yields", "'yields' must take .* and return what they are worth, but yields"),
        ("yields_soon", "'yields_soon' must take .* and return what they are worth, but yields"),
        ("Built", "'Built' must take .* is a class; name a function, or an object with __call__"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_what_cannot_be_called_is_refused(own: Path, name: str, said: str) -> None:
    with pytest.raises(RewardError, match=rf"^reward\.parts\.p\.kind={own}:{name}: .*{said}"):
        load_reward(RewardConfig(kind=f"{own}:{name}"), "reward.parts.p")


def test_a_row_chooses_its_rewards_in_the_order_of_the_options() -> None:
    config = RewardConfig(parts={"a": {}, "b": {}, "c": {}})

    def chosen(**fields: Any) -> list[str]:
        return chosen_rewards(config, Prompt(7, (1,), "p", fields), "rows.jsonl:3")

    assert chosen() == chosen(reward=None) == ["a", "b", "c"]
    assert chosen(reward=["c", "a"]) == ["a", "c"] and chosen(reward="b") == ["b"]
    with pytest.raises(RewardError, match=r"^rows\.jsonl:3: column 'reward' is 'd', which must name one .*a, b, c"):
        chosen(reward="d")
    with pytest.raises(RewardError, match=r"^prompt 7: column 'reward'"):
        chosen_rewards(config, Prompt(7, (1,), "p", {"reward": [3]}))
    alone = Prompt(0, (1,), "p", {"reward": "of another use"})
    assert chosen_rewards(RewardConfig(), alone) == ["exact_match"], "one reward judges all rows"
    assert _fields(Prompt(0, (1,), "p", {"finish_reason": "own"}), "stop") == {"finish_reason": "own"}
    assert _fields(alone, "length") == {"finish_reason": "length", "reward": "of another use"}
    assert alone.fields.keys() == {"reward"}


def test_what_was_counted_is_taken_once_and_named_after_its_reward() -> None:
    runner = RewardRunner(RewardConfig(parts={"a": {}, "b": {}}))
    runner._pools["a"].counts.update({"requests": 2})
    runner._pools["b"].counts.update({"cached": 1, "requests": 3})
    assert runner.take_counts() == {"a_requests": 2, "b_cached": 1, "b_requests": 3}
    assert runner.take_counts() == {}
