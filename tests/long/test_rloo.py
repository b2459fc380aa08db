"""Locks: an algorithm's loss is its formula, end to end: options arrive in a run. (The formulas of all algorithms are
compared with TRL's and verl's functions in tests/unit.)

A batch is one group, and a response is worth its length in tokens. With lengths l_i of mean m and deviation s, A_i the
advantages and n the group's size, the policy loss at a ratio of 1 is -sum(A_i l_i) / D:

    A_i = (l_i - m) n / (n - 1)      D = n * max_tokens     loss = -s^2 / max_tokens * n / (n - 1)

and m and s are reward/mean and reward/std of the same row of metrics.jsonl.
"""

from pathlib import Path

import pytest
from system.conftest import RUN_TIMEOUT_S, train
from system.test_learning import SMALL

GROUP_SIZE, MAX_TOKENS = 16, 16
KL_COEF = 0.5
RLOO = [
    *SMALL, "algorithm=rloo", f"algorithm.kl_coef={KL_COEF}", "run.num_steps=4", "data.eval_path=null",
    "algorithm.groups_per_step=1", f"algorithm.group_size={GROUP_SIZE}",
    f"rollout.sampling.max_tokens={MAX_TOKENS}", "rollout.sampling.stop_at_eos=true",
    "reward.kind=tests.fakes.length_reward:num_tokens", "reward.keep_special_tokens=true",
]  # fmt: skip


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_rloo_divides_by_the_longest_response_and_pays_for_the_divergence(cluster: str, tmp_path: Path) -> None:
    """It does not divide by the deviation. The divergence from the reference starts at 0 and grows; RLOO divides the
    sum of it over all tokens by n * max_tokens, too, and loss/kl is per token.
    """
    run = train([*RLOO, cluster], tmp_path)
    assert run.exit_code == 0, run.stderr
    steps = run.rows[1:]
    for row in steps:
        assert row["reward/mean"] == pytest.approx(row["rollout/response_tokens_mean"])
        expected = -(row["reward/std"] ** 2) / MAX_TOKENS * GROUP_SIZE / (GROUP_SIZE - 1)
        assert row["loss/policy"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        paid = KL_COEF * row["loss/kl"] * row["rollout/response_tokens_mean"] / MAX_TOKENS
        assert row["loss/total"] == pytest.approx(row["loss/policy"] + paid, rel=1e-5, abs=1e-6)
    assert max(row["reward/std"] for row in steps) > 0.5, "all responses were of one length: nothing was compared"
    divergences = [row["loss/kl"] for row in steps]
    assert abs(divergences[0]) < 1e-9 < 1e-6 < divergences[-1], "adapters start as nothing, and move"
