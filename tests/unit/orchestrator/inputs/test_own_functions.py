"""Locks: a loss and an advantage of the user's own are called, copied and refused with one message each."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases.samples import build_samples

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import AlgorithmConfig, RunConfig
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.files.kept_code import keep_sources
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.inputs.given_code import check_algorithm_loads
from slipstream.orchestrator.inputs.own_advantage import own_advantage, try_advantage
from slipstream.orchestrator.inputs.rows.prompt_rows import first_prompts
from slipstream.rollout.types import Group, Prompt, Rollout

OWN = """
import numpy as np
import torch

def centred(groups):
    return [[None if r is None else r - 0.5 for r in group.rewards] for group in groups]

def by_token(groups):
    return [[np.arange(len(rollout.token_ids)) for rollout in group.rollouts] for group in groups]

def array(groups):
    return np.array([[1.0, 0.0, 2.0] for group in groups])

def tensor(groups):
    return torch.tensor([[1.0, 0.0, 2.0] for group in groups], dtype=torch.bfloat16).float()

def one_by_one(groups):
    for group in groups:
        yield np.array([1.0, 0.0, 2.0], dtype=np.float32)

def fails_late(groups):
    yield groups[9]

def without_dimensions(groups):
    return np.array(1.0)

def all_in_one(groups):
    return np.zeros(3 * len(groups))

def with_a_gradient(groups):
    return torch.zeros(len(groups), 3, requires_grad=True)

def short(groups):
    return [[0.0] for group in groups]

def flat(groups):
    return 1.0

def nan(groups):
    return [[float("nan")] * len(group.rollouts) for group in groups]

def text(groups):
    return [["good"] * len(group.rollouts) for group in groups]

def raises(groups):
    return groups[0].rollouts[9]

def two(groups, config):
    return []
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def a_group(rewards: list[float | None]) -> Group:
    rollouts = [Rollout([9] * (i + 1), [-0.5] * (i + 1), [0] * (i + 1), "t", "stop") for i in range(len(rewards))]
    return Group(Prompt(0, (1,), "a"), rollouts, rewards)


def test_numbers_of_responses_and_of_tokens_reach_the_samples(path: Path) -> None:
    groups = [a_group([1.0, None, 0.0])]
    samples = build_samples(groups, AlgorithmConfig(advantage=f"{path}:centred"))
    assert [sample.advantages.tolist() for sample in samples] == [[0, 0.5], [0, -0.5, -0.5, -0.5]]
    samples = build_samples(groups, AlgorithmConfig(advantage=f"{path}:by_token"))
    assert [sample.advantages.tolist() for sample in samples] == [[0, 0], [0, 0, 1, 2]]


@pytest.mark.parametrize("name", ["array", "tensor", "one_by_one"])
def test_arrays_tensors_and_generators_are_lists(path: Path, name: str) -> None:
    found = own_advantage(f"{path}:{name}")([a_group([1.0, None, 0.0]), a_group([1.0, 0.0, 0.0])], None)
    assert [[None if one is None else one.tolist() for one in of_group] for of_group in found] == [
        [[1.0], None, [2.0, 2.0, 2.0]],
        [[1.0], [0.0, 0.0], [2.0, 2.0, 2.0]],
    ]


def test_penalties_come_off_the_rewards_that_it_sees(path: Path) -> None:
    found = own_advantage(f"{path}:centred")([a_group([1.0, 0.0])], [[np.array([0.25]), np.array([0.5, 0.5])]])
    assert [values.tolist() for values in found[0] if values is not None] == [[0.25], [-1.5, -1.5]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "group 0: it returned list of 1, not 3 advantages, one for each response: it must be"),
        ("flat", "it returned 1.0, not 2 lists, one for each group"),
        ("without_dimensions", r"it returned array\(1\.\), not 2 lists"),
        ("all_in_one", "it returned ndarray of 6, not 2 lists"),
        ("with_a_gradient", r"group 0, response 0: it returned tensor\(0\., "),
        ("fails_late", "raised IndexError"),
        ("nan", "group 0, response 0: it returned nan"),
        ("text", "group 0, response 0: it returned 'good'"),
        ("raises", "raised IndexError"),
        ("two", r"it must be \(groups\) -> for each group"),
        ("nothing", "has no function 'nothing'; it has .*short.*raises"),
    ],
)
def test_what_is_wrong_with_an_advantage_is_one_message(path: Path, name: str, message: str) -> None:
    config = load_run_config(["experiment=quickstart", f"algorithm.advantage={path}:{name}", "algorithm.group_size=3"])
    with pytest.raises(ConfigError, match=rf"^algorithm\.advantage={path}:{name}.*{message}"):
        try_advantage(config, first_prompts(config, most_rows=2))


READS = """
def by_level(groups):
    for group in groups:
        assert group.prompt.fields["level"] in (1, 2), group.prompt.fields
        assert len(group.rollouts) == len(group.rewards) == len(group.parts) == 4
    return [[(part["right"] or 0) * 0.5 + part["overlong_penalty"] for part in group.parts] for group in groups]

def careless(groups):
    return [[reward - 1 for reward in group.rewards] for group in groups]
"""


def test_an_advantage_is_tried_on_the_runs_own_rows_and_reward_parts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(READS)
    rows = [{"prompt": "a=", "answer": "a", "level": 1}, {"prompt": "b=", "answer": "b", "level": 2}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *("experiment=quickstart", "data=files", f"data.path={tmp_path}/rows.jsonl", "data.eval_path=null"),
        *("run.eval_every_steps=0", "reward.parts={right:{kind:exact_match}}", "reward.overlong_tokens=1"),
        *("algorithm.group_size=4",),
    ]
    right = load_run_config([*words, f"algorithm.advantage={tmp_path}/own.py:by_level"])
    assert check_algorithm_loads(right).finding == f"{tmp_path}/own.py:by_level"
    careless = load_run_config([*words, f"algorithm.advantage={tmp_path}/own.py:careless"])
    with pytest.raises(ConfigError, match=r"raised TypeError.*tried on 2 groups of the first rows.*failed, None"):
        check_algorithm_loads(careless)
    absent = replace(right, data=replace(right.data, path=str(tmp_path / "absent.jsonl")))
    assert check_algorithm_loads(absent).finding == f"{tmp_path}/own.py:by_level", "another check names the data"


def test_a_loss_beside_the_users_other_files_is_tried_with_pythons_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logging.py").write_text("raise RuntimeError('a log of the user')\n")
    (tmp_path / "losses.py").write_text("def plain(tokens, algorithm): return -tokens.logprobs_N\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "one.py").write_text("from losses import plain\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    for loss in ("own/one.py:plain", "losses:plain"):
        config = load_run_config(["experiment=quickstart", f"algorithm.loss={loss}"])
        assert check_algorithm_loads(config).finding == loss


def test_numbers_that_are_not_finite_end_the_run_with_the_response(path: Path) -> None:
    with pytest.raises(TrainingStopped, match="group 0, response 0: it returned nan"):
        own_advantage(f"{path}:nan")([a_group([1.0, 0.0])], None)


def test_their_files_are_kept(path: Path, tmp_path: Path) -> None:
    config = RunConfig()
    own = replace(
        config.algorithm, loss=f"{path}:centred", advantage="slipstream.orchestrator.loop.advantages:whitened"
    )
    (tmp_path / "run").mkdir()
    keep_sources(RunFolder(tmp_path / "run"), replace(config, algorithm=own))
    assert (tmp_path / "run" / "loss_source.py").read_text() == OWN
    assert "def whitened(" in (tmp_path / "run" / "advantage_source.py").read_text()
