"""A run says who judges, that the default does if nobody chose, and that a judge cannot be reached."""

import socket

import pytest
from cases.held_port import held_port

from slipstream.conf.load import load_run_config
from slipstream.orchestrator.inputs.facts import Fact
from slipstream.orchestrator.inputs.given_code import check_reward_loads, unchosen_reward, who_judges

MINE = ["model.path=/m", "data.path=rows.jsonl"]
GAME = "rollout.agent=agent.py:play"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "exact_match: 1 if a response equals the row's column 'answer', otherwise 0"),
        (["reward=math"], "math"),
        (["reward.parts={right: {}, math: {kind: math, weight: 0.5}}"], "1 x right, 0.5 x math"),
        ([GAME], "what the agent returns"),
        ([GAME, "reward=math"], "what the agent returns; where that is None, math"),
    ],
)
def test_who_judges_is_told(words: list[str], said: str) -> None:
    assert who_judges(load_run_config([*MINE, *words])) == said


def test_the_default_reward_is_told_where_nobody_chose_it() -> None:
    said = unchosen_reward(load_run_config(MINE), MINE)
    assert said.startswith("reward: exact_match, which no word of the command chose: 1 if a response equals")
    assert "\n" not in said


@pytest.mark.parametrize(
    "words",
    [["reward=exact_match"], ["reward.weight=2"], ["reward=math"], [GAME], ["algorithm=sft"], ["run.num_steps=0"]],
)
def test_nothing_is_told_of_a_reward_that_was_chosen_or_does_not_judge(words: list[str]) -> None:
    words = [*(["experiment=sft_quickstart"] if words == ["algorithm=sft"] else []), *MINE, *words]
    assert unchosen_reward(load_run_config(words), words) == ""


def test_a_judge_that_cannot_be_reached_is_a_warning() -> None:
    with held_port() as port:
        url = f"http://127.0.0.1:{port}/v1"
        config = load_run_config([*MINE, "reward=judge", f"reward.judge.base_url={url}", "reward.judge.model=m"])
        fact = check_reward_loads(config)
        with socket.create_server(("127.0.0.1", port)):
            assert check_reward_loads(config) == Fact("reward", "judge")
    assert fact is not None and fact.is_warning
    assert f"judge; the judge at {url} cannot be reached" in fact.finding
