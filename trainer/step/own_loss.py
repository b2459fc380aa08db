"""A loss of the user's own: `algorithm.loss=FILE.py:function`, with (LossTokens, AlgorithmConfig) -> [N] losses.

Owns: how it is found and called, what it may return, and how it is tried before a run. Does not own: what it gets
(surrogates.py), or what its losses are weighed by and divided by (loss.py).

Invariant: what is wrong with it is one message that names the option.
"""

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.failures import raised_as
from slipstream.conf.functions import import_function, is_function_path
from slipstream.conf.schema import AlgorithmConfig
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.step.surrogates import LOSSES, LossTokens, TokenLosses

_SIGNATURE = "(tokens, algorithm) -> a tensor of one loss per token (docs/algorithms.md)"


@functools.cache
def loss_function(value: str) -> Callable[[LossTokens, AlgorithmConfig], TokenLosses]:
    """The loss that algorithm.loss names.

    Raises:
        ConfigError: It is a function that cannot be imported, or takes other arguments.
    """
    if not is_function_path(value):
        return LOSSES[value]
    function = import_function("algorithm.loss", value)
    try:
        inspect.signature(function).bind("tokens", "algorithm")
    except TypeError as error:
        raise ConfigError(f"algorithm.loss={value}: it must be {_SIGNATURE}: {error}") from error
    except ValueError:
        pass  # built-ins have no signature to check
    return functools.partial(_call, function, value)


def _call(function: Callable[..., Any], value: str, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLosses:
    """The function's losses, checked. A microbatch without tokens has a loss of 0 that it is not asked for. Raises
    TrainerError: It failed, or returned something else than one finite loss per token with a gradient."""
    none_N = torch.zeros_like(tokens.advantages_N, dtype=torch.bool)
    if tokens.logprobs_N.numel() == 0:
        return TokenLosses(tokens.logprobs_N * 0.0, none_N, none_N)
    with raised_as(TrainerError, f"algorithm.loss={value} raised "):
        loss_N = function(tokens, algorithm)
    wanted = tuple(tokens.logprobs_N.shape)
    if not isinstance(loss_N, Tensor) or tuple(loss_N.shape) != wanted:
        got = f"a tensor of shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        raise TrainerError(
            f"algorithm.loss={value} returned {got}, not one loss for each of {wanted[0]} tokens: it must be "
            f"{_SIGNATURE}; means and sums over tokens are algorithm.normalization's"
        )
    if tokens.logprobs_N.requires_grad and not loss_N.requires_grad:
        raise TrainerError(
            f"algorithm.loss={value} returned losses without a gradient: they must depend on tokens.logprobs_N"
        )
    is_finite_N = torch.isfinite(loss_N.detach())
    if not bool(is_finite_N.all()):
        at = int((~is_finite_N).nonzero()[0, 0])
        raise TrainerError(
            f"algorithm.loss={value} returned {loss_N[at].item()} for token {at} of {wanted[0]}, with log-probability "
            f"{tokens.logprobs_N[at].item():.4g}, denominator {tokens.old_logprobs_N[at].item():.4g} and advantage "
            f"{tokens.advantages_N[at].item():.4g}"
        )
    return TokenLosses(loss_N, none_N, none_N)


def try_loss(algorithm: AlgorithmConfig) -> None:
    """Call the loss on seven made-up tokens of two sequences, forward and backward.

    Raises:
        SlipstreamError: It cannot be used.
    """
    old_N = torch.tensor([-0.1, -2.0, -1.0, -3.0, -0.5, -1.5, -9.0])
    logprobs_N = (old_N + torch.tensor([0.0, 0.4, -0.4, 1.0, -1.0, 0.1, 8.0])).requires_grad_()
    lengths_N = torch.tensor([3, 3, 3, 4, 4, 4, 4])
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        rollout_logprobs_N=old_N,
        advantages_N=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]),
        weights_N=torch.ones(7),
        entropy_N=torch.full((7,), 0.5, requires_grad=algorithm.entropy_coef != 0),
        ref_logprobs_N=old_N if algorithm.kl_coef > 0 else None,
        sequence_index_N=torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        sequence_lengths_N=lengths_N,
        positions_N=torch.tensor([0, 1, 2, 0, 1, 2, 3]),
        staleness_N=torch.tensor([0, 0, 0, 1, 1, 1, 1]),
    )
    loss_function(algorithm.loss)(tokens, algorithm).loss_N.sum().backward()
    if logprobs_N.grad is None or not bool(torch.isfinite(logprobs_N.grad).all()):
        raise TrainerError(f"algorithm.loss={algorithm.loss} has a gradient that is not finite, or none")


def try_what_is_given() -> None:
    """Try the loss of a pickled AlgorithmConfig on standard input; end with one line if it fails."""
    sys.path.append(os.getcwd())  # ranks have it there, of Ray
    try:
        try_loss(pickle.load(sys.stdin.buffer))
    except SlipstreamError as problem:
        sys.exit(str(problem))
