"""Locks: what a loss of the user's own gets; whatever is wrong with it is one message that names the option."""

import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from oracles.cases import Case, ours

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.schema import AlgorithmConfig
from slipstream.rollout.in_vllm.fork_server import python_calls
from slipstream.trainer.step.own_loss import loss_function, try_loss

OWN = '''
import torch

def clipped(tokens, algorithm):
    """The loss that ships, written once more."""
    ratio, a = tokens.log_ratio_N.exp(), tokens.advantages_N
    return -torch.minimum(ratio * a, ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * a)

def mean(tokens, algorithm):
    return clipped(tokens, algorithm).mean()

def number(tokens, algorithm):
    return 1.0

def nan_where_far(tokens, algorithm):
    return clipped(tokens, algorithm) + (tokens.log_ratio_N.detach() - 5).clamp(min=0).log().exp() * float("nan")

def infinite_where_far(tokens, algorithm):
    return clipped(tokens, algorithm) + (5 - tokens.log_ratio_N.detach()).clamp(min=0).log()

def frozen(tokens, algorithm):
    return clipped(tokens, algorithm).detach()

def raises(tokens, algorithm):
    return tokens.no_such_field

def refers(tokens, algorithm):
    return tokens.logprobs_N - tokens.ref_logprobs_N

def wants_entropy(tokens, algorithm):
    assert tokens.entropy_N.requires_grad
    return clipped(tokens, algorithm)

built_in = max

def one_argument(tokens):
    return tokens.logprobs_N
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_function_of_the_users_own_is_the_loss(path):
    """It sees the same tokens and options as the loss that ships, hence has the same values and gradients."""
    for mine, shipped in zip(
        ours(Case("", "", {"loss": f"{path}:clipped"})), ours(Case("", "", {"loss": "clip"})), strict=True
    ):
        torch.testing.assert_close(mine, shipped)
    try_loss(AlgorithmConfig(loss=f"{path}:clipped"))
    try_loss(AlgorithmConfig(loss=f"{path}:refers", kl_coef=0.1))
    for coef in (0.1, -0.1):
        try_loss(AlgorithmConfig(loss=f"{path}:wants_entropy", entropy_coef=coef))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", r"returned a tensor of shape \(\), not one loss for each of 7 tokens"),
        ("number", "returned float, not one loss for each of 7 tokens"),
        ("nan_where_far", "returned nan for token 0 of 7, with log-probability -0.1, denominator -0.1 and advantage 1"),
        ("infinite_where_far", "returned -inf for token 6 of 7, with log-probability -1, denominator -9"),
        ("frozen", "without a gradient: they must depend on tokens.logprobs_N"),
        ("raises", "raised AttributeError: .*no_such_field"),
        ("refers", "raised TypeError: .*NoneType"),  # there is no reference without kl_coef
        ("built_in", "raised TypeError: .*not supported between"),  # its signature cannot be read before
        ("one_argument", r"it must be \(tokens, algorithm\) -> a tensor"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_what_is_wrong_with_it_is_one_message(path, name, message):
    with pytest.raises(SlipstreamError, match=rf"^algorithm\.loss={path}:{name}.*{message}"):
        try_loss(AlgorithmConfig(loss=f"{path}:{name}"))


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"algorithm\.loss=no\.py:f: there is no file .*no\.py"):
        loss_function("no.py:f")


def test_it_is_tried_in_a_process_of_its_own(path):
    """As before a run: the last line of its errors is the message, and no traceback."""
    tried = subprocess.run(
        python_calls("slipstream.trainer.step.own_loss:try_what_is_given"),
        input=pickle.dumps(AlgorithmConfig(loss=f"{path}:mean")),
        capture_output=True,
        timeout=100,
        check=False,
    )
    said = tried.stderr.decode()
    assert tried.returncode == 1 and "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith(f"algorithm.loss={path}:mean returned a tensor of shape ()")
