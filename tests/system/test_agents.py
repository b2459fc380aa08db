"""Locks: an agent's episodes are trained token for token. (What is paid for in them is learned: tests/long.)

Real Ray, vLLM, Mooncake, FSDP2, endpoint and agents' processes; all is asserted on metrics.jsonl. The trainer computes
the log-probability of every sampled token from the sequence that it is given, and the engine from what it was given: if
one token of an episode were another one, parity/k3 would be near 1. It is 1e-13, and up to 1e-5 in steps in which a
single token's experts differ. Steps are so small that this holds for tokens of the version before, too. Conversations
are rendered by Qwen3's published template.
"""

from pathlib import Path

import pytest
from fakes.template_tokenizer import NUM_WORDS, QWEN, QWEN_PLAIN, save_template_tokenizer
from system.conftest import ONE_OF_EACH, RUN_TIMEOUT_S, train

pytestmark = pytest.mark.timeout(RUN_TIMEOUT_S)

TALK = [
    "experiment=agent_game", *ONE_OF_EACH, "run.loggers=[]",
    "rollout.agent=tests.fakes.openai_agent:talk", "rollout.sampling.max_tokens=3", "rollout.max_model_len=512",
    "data.max_prompt_tokens=64", "rollout.sampling.stop_at_eos=true", "rollout.episodes.max_turns=8",
    "rollout.episodes.tool_parser=hermes", "data.eval_path=null",
    "algorithm.groups_per_step=4", "algorithm.group_size=4", "algorithm.max_staleness_steps=1",
    "run.num_steps=3", "run.checkpoint_every_steps=0", "trainer.optim.lr=1.0e-6",
]  # fmt: skip


def test_openais_client_edited_histories_failures_and_stale_episodes(cluster: str, tmp_path: Path) -> None:
    """With Qwen3's published chat template. It removes the thinking from a history: an answer in which the random
    policy happens to say </think> begins a branch more.
    """
    model = tmp_path / "model"
    model.mkdir()
    save_template_tokenizer(model, "qwen3", QWEN, QWEN_PLAIN)
    vocab = [f"vocab_size={NUM_WORDS + len(QWEN) + len(QWEN_PLAIN)}", f"eos_token_id={NUM_WORDS}"]
    run = train(
        [*TALK, cluster, f"model.tokenizer={model}", *(f"++model.hf_config.{word}" for word in vocab)], tmp_path
    )
    assert run.exit_code == 0, run.stderr
    rows = run.rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
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
