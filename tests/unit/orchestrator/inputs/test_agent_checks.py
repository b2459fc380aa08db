"""Locks: an agent that cannot run is refused before anything starts; the message names the option and the cure."""

import socket
from pathlib import Path

import pytest
from fakes.template_tokenizer import QWEN, save_template_tokenizer

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.orchestrator.inputs.given_code import check_agent_loads

GAME = ["experiment=agent_game", "cluster.device=cpu"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rollout.agent=nowhere.py:play", "there is no file"),
        ("rollout.agent=slipstream.rollout.agents.games.letters:lose", "has no function 'lose'"),
        (
            "rollout.agent=slipstream.rollout.agents.games.missing:play",
            "importing 'slipstream.rollout.agents.games.missing' failed",
        ),
        ("rollout.agent=slipstream.rollout.agents.games.letters:Session", "must be `async def`"),
        ("rollout.episodes.tool_parser=herms", r"is none of vLLM's: give one of .*hermes"),
        ("rollout.episodes.tool_parser=hermes", "the chat template of model.tokenizer=characters writes no tools"),
        ("rollout.episodes.env=[NO_SUCH_KEY_HERE]", "NO_SUCH_KEY_HERE, which is not set"),
        ("rollout.episodes.address=203.0.113.7:0", "give an address of this machine"),
    ],
)
def test_what_cannot_run_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check_agent_loads(load_run_config([*GAME, word]))
    assert word.partition("=")[0] in str(refused.value)


def test_a_parser_needs_a_template_that_writes_tools(tmp_path: Path) -> None:
    words = [*GAME, f"model.tokenizer={tmp_path}", "rollout.episodes.tool_parser=hermes"]
    save_template_tokenizer(tmp_path, "deepseek_r1_distill", QWEN)
    with pytest.raises(ConfigError, match=r"the chat template of .* writes no tools.*tool_parser=null"):
        check_agent_loads(load_run_config(words))
    save_template_tokenizer(tmp_path, "qwen3", QWEN)
    assert check_agent_loads(load_run_config(words)).finding


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        word = f"rollout.episodes.address=127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=word):
            check_agent_loads(load_run_config([*GAME, word]))


def test_an_agents_module_that_exits_or_raises_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    for line, said in (("import sys; sys.exit(3)", "SystemExit: 3"), ("1 / 0", "ZeroDivisionError")):
        (tmp_path / "mine.py").write_text(f"{line}\nasync def play(task, session): ...\n")
        with pytest.raises(ConfigError, match=said):
            check_agent_loads(load_run_config([*GAME, f"rollout.agent={tmp_path / 'mine.py'}:play"]))
    (tmp_path / "mine.py").write_text("import os; os._exit(3)\n")
    with pytest.raises(ConfigError, match="its process ended while it started"):
        check_agent_loads(load_run_config([*GAME, f"rollout.agent={tmp_path / 'mine.py'}:play"]))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rollout.agent=play", r"rollout\.agent must be FILE\.py:function"),
        ("rollout.episodes.max_turns=0", r"rollout\.episodes\.max_turns must be >= 1"),
        ("rollout.episodes.address=a:70000", r"rollout\.episodes\.address must be HOST:PORT"),
        ("rollout.episodes.timeout_s=0", r"rollout\.episodes\.timeout_s must be > 0"),
        (
            "rollout.agent=null rollout.episodes.max_turns=2",
            r"rollout\.episodes\.max_turns has no effect with rollout\.agent=null",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_run_config([*GAME, *word.split()])


def test_the_fact_names_agent_and_turns() -> None:
    fact = check_agent_loads(load_run_config(GAME))
    assert fact is not None and fact.finding == "slipstream.rollout.agents.games.letters:play, at most 3 turns"
    assert check_agent_loads(load_run_config(["experiment=quickstart"])) is None
