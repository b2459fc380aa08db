"""Locks: an agent's episodes are trained token for token, and what is paid for in them is learned.

Real Ray, vLLM, Mooncake, FSDP2, endpoint and agents' processes; all is asserted on metrics.jsonl and samples.jsonl. The
trainer computes the log-probability of every sampled token from the sequence that it is given, and the engine from what
it was given: if one token of an episode were another one, parity/k3 would be near 1. It is 1e-13, and up to 1e-5 in
steps in which a single token's experts differ. In the last run the steps are so small that this holds for tokens of
the version before, too; its conversations are rendered by Qwen3's published template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.template_tokenizer import NUM_WORDS, QWEN, QWEN_PLAIN, save_template_tokenizer
from fakes.two_games import letter_rows, lookup_rows, marked, write_rows
from system.conftest import ONE_OF_EACH, RUN_TIMEOUT_S, Nodes, RunUnderWay, train

pytestmark = pytest.mark.timeout(RUN_TIMEOUT_S)

SMALL = ["experiment=agent_game", *ONE_OF_EACH, "run.loggers=[]"]
GAMES = [*SMALL, "run.checkpoint_every_steps=0"]
HELD_OUT = ("eval/letters/reward", "eval/tool/reward")
Rows = list[dict[str, Any]]
TALK = [
    *SMALL, "rollout.agent=tests.fakes.openai_agent:talk", "rollout.sampling.max_tokens=3", "rollout.max_model_len=512",
    "data.max_prompt_tokens=64", "rollout.sampling.stop_at_eos=true", "rollout.episodes.max_turns=8",
    "rollout.episodes.tool_parser=hermes", "data.eval_path=null",
    "algorithm.groups_per_step=4", "algorithm.group_size=4", "algorithm.max_staleness_steps=1",
    "run.checkpoint_every_steps=2", "trainer.optim.lr=1.0e-6",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[str]]:
    """The option that names a Ray cluster for all runs."""
    nodes = Nodes(2)
    yield [f"cluster.ray_address={nodes.address}"]
    nodes.close()


def rows_of_both_games(folder: Path, mark: Callable[[Rows], Rows] = lambda rows: rows) -> list[str]:
    """Options: as many rows of one game as of the other, each with held-out rows of its own.

    Args:
        mark: Changes the rows of the tool's game.
    """
    tool = mark(lookup_rows("train"))
    both = [row for pair in zip(letter_rows("train"), tool, strict=False) for row in pair]
    paths = {
        name: write_rows(folder / f"{name}.jsonl", content)
        for name, content in {
            "both": both, "letters": letter_rows("heldout"), "tool": mark(lookup_rows("heldout")),
        }.items()
    }  # fmt: skip
    return [
        f"data.path={paths['both']}",
        "data.eval_path=null",
        f"data.eval_sets.letters={paths['letters']}",
        f"data.eval_sets.tool={paths['tool']}",
    ]


def assert_episodes_of_both_games(run: RunUnderWay) -> None:
    """Three turns each, of both kinds, whose tokens are those that the engine was given and sampled."""
    for row in run.rows[1:]:
        assert row["rollout/turns_mean"] == 3
        assert row["rollout/branches_mean"] == 1
        assert row["parity/k3"] < 1e-3
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    given = ["".join(turn["given"] for turn in sample["turns"]) for sample in samples]
    spoke = {(text.count("user: "), text.count("tool: ")) for text in given}
    assert spoke == {(3, 0), (1, 2)}  # every turn of the letters is the user's, and of the tool's game only the first
    assert all(bool(turn["given"] and turn["said"]) for turn in samples[0]["turns"])


def test_answers_to_users_and_to_a_tool_are_learned(cluster: list[str], tmp_path: Path) -> None:
    """What is right in an episode of one kind is wrong in the other, so each is the other's control; by chance an
    eighth of the answers is right. Seen: both above 0.6 after 16 to 28 steps. The whole games: tests/long.
    """
    options = rows_of_both_games(tmp_path, marked)
    words = ["rollout.agent=tests.fakes.two_games:answer_in_kind", "algorithm.groups_per_step=8"]
    words += ["run.num_steps=60", "run.eval_every_steps=4", "rollout.eval.temperature=1.0"]
    with RunUnderWay([*GAMES, *cluster, *options, *words], tmp_path) as run:
        run.wait_until(lambda rows: any(min(row[name] or 0 for name in HELD_OUT) > 0.6 for row in rows))
        run.stop()
    assert all(run.rows[0][name] < 0.3 for name in HELD_OUT)
    assert_episodes_of_both_games(run)


def test_openais_client_edited_histories_failures_stale_episodes_and_a_resumed_run(
    cluster: list[str], tmp_path: Path
) -> None:
    """With Qwen3's published chat template. It removes the thinking from a history: an answer in which the random
    policy happens to say </think> begins a branch more.
    """
    model = tmp_path / "model"
    model.mkdir()
    save_template_tokenizer(model, "qwen3", QWEN, QWEN_PLAIN)
    vocab = [f"vocab_size={NUM_WORDS + len(QWEN) + len(QWEN_PLAIN)}", f"eos_token_id={NUM_WORDS}"]
    talk = [*TALK, *cluster, f"model.tokenizer={model}", *(f"++model.hf_config.{word}" for word in vocab)]
    run = train([*talk, "run.num_steps=2"], tmp_path)
    assert run.exit_code == 0, run.stderr
    resumed = train([*talk, "run.num_steps=4", f"run.resume={run.folder}"], tmp_path)
    assert resumed.exit_code == 0, resumed.stderr
    rows = resumed.rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert row["rollout/turns_mean"] == 6
        # A conversation, the same without tools and with an edited history, and the plain prompt.
        assert row["rollout/branches_mean"] == 4 + row["rollout/branches_template"] / 16
        for reason in ("tools", "edited", "new"):
            assert row[f"rollout/branches_{reason}"] == 16
        assert row["reward/failures"] == row["rollout/failed_raised"]
        for mismatch in (row["parity/k3"], row["parity/k3_stale"]):
            assert mismatch is None or mismatch < 1e-3
    assert sum(row["rollout/failed_raised"] for row in rows[1:]) > 0
    assert max(row["staleness/max"] for row in rows[1:]) == 1
