"""Locks: a run that is to be resumed says, before it starts, which files behind its functions are other ones than the
run had."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.conf.load import load_run_config
from slipstream.orchestrator.inputs.given_code import check_agent_loads, check_algorithm_loads, check_reward_loads

REWARD = "def score(prompt, response, fields):\n    return 0.5\n"
AGENT = "async def play(task, session):\n    return 0.5\n"
PROMPT = "{{response}}\nScore: a number\n"


def said(words: Sequence[str]) -> dict[str, str]:
    config = load_run_config(words)
    facts = [check(config) for check in (check_reward_loads, check_algorithm_loads, check_agent_loads)]
    return {fact.subject: fact.finding for fact in facts if fact is not None}


def test_files_that_a_run_had_with_other_content_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (run := tmp_path / "run").mkdir()
    for copy, content in (("reward_source_own", REWARD), ("agent_source", AGENT)):
        (run / f"{copy}.py").write_text(content)
    (run / "reward_prompt_judged.txt").write_text(PROMPT)
    Path("reward.py").write_text(REWARD)
    Path("imports.py").write_text("from reward import score\n")
    Path("agent.py").write_text(AGENT)
    Path("grade.txt").write_text(PROMPT)
    judge = ["base_url=http://127.0.0.1:9/v1", "model=m", "prompt_file=grade.txt"]
    words = [
        *("experiment=agent_game", "cluster.device=cpu", "rollout.agent=agent.py:play", f"run.resume={run}"),
        *("+reward.parts.own.kind=imports.py:score", "+reward.parts.judged.kind=judge"),
        *(f"+reward.parts.judged.judge.{option}" for option in judge),
    ]
    assert "another file" not in str(said(words)), "what imports.py names is written in reward.py"
    Path("reward.py").write_text(REWARD + "# mended\n")
    Path("agent.py").write_text(AGENT + "# mended\n")
    Path("grade.txt").write_text(PROMPT + "mended\n")
    another = "is another file than the run had before"
    facts = said(words)
    assert facts["agent"].endswith(f"; {tmp_path / 'agent.py'} {another} (agent_source.py)")
    assert f"; {tmp_path / 'reward.py'} {another} (reward_source_own.py)" in facts["reward"]
    assert f"; grade.txt {another} (reward_prompt_judged.txt)" in facts["reward"]
    assert "another file" not in str(said([word for word in words if "resume" not in word]))


def test_so_is_the_file_of_an_advantage(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def centred(groups):\n    return [[0.0] * len(group.rewards) for group in groups]\n")
    (run := tmp_path / "run").mkdir()
    (run / "advantage_source.py").write_text(own.read_text())
    words = ["experiment=quickstart", f"algorithm.advantage={own}:centred", f"run.resume={run}"]
    assert said(words)["algorithm"] == f"{own}:centred"
    own.write_text(own.read_text() + "# mended\n")
    assert said(words)["algorithm"].endswith("than the run had before (advantage_source.py)")
