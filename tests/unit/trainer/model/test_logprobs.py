"""Promises of trainer/model/logprobs.py. Oracle: float64 log_softmax over full logits, differentiated by autograd."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.trainer.model.logprobs import token_logprobs

T, H, V = 23, 16, 50


def make_inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator).to(dtype)
    weight = torch.randn(V, H, generator=generator).to(dtype)
    targets = torch.randint(V, (T,), generator=generator)
    return hidden, weight, targets


def oracle(hidden, weight, targets, temperature, softcap=None):
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(
    ("chunk_tokens", "has_entropy"), [(1, False), (7, False), (23, False), (1000, False), (7, True)]
)
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (0.7, 3.0)])
def test_values_and_gradients_equal_full_softmax(chunk_tokens, has_entropy, temperature, softcap, is_frozen):
    """Gradients of the log-probabilities, and those through the entropy where it is differentiated."""
    hidden, weight, targets = make_inputs()
    up, across = torch.linspace(-1, 1, T), torch.linspace(0.5, -2, T) * has_entropy
    mine = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not is_frozen)]
    logprobs, entropy = token_logprobs(
        mine[0],
        mine[1],
        targets,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        differentiate_entropy=has_entropy,
        softcap=softcap,
    )
    assert entropy.requires_grad is has_entropy
    (logprobs @ up + entropy @ across).backward()

    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    exact_logprobs, exact_entropy = oracle(exact[0], exact[1], targets, temperature, softcap)
    (exact_logprobs @ up.double() + exact_entropy @ across.double()).backward()

    torch.testing.assert_close(logprobs.double(), exact_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-5)
    for got, want in zip(mine[: 1 if is_frozen else 2], exact, strict=False):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-5)
    assert not is_frozen or mine[1].grad is None


class Watched(TorchDispatchMode):
    """Counts matrix products, and the most rows that any tensor with a vocabulary-sized last dim has."""

    num_products = max_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_products += func.overloadpacket is torch.ops.aten.mm
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 2 and tensor.shape[-1] == V:
                self.max_rows = max(self.max_rows, tensor.shape[0])
        return result


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_frozen_head_is_multiplied_with_twice(is_frozen):
    hidden, weight, targets = make_inputs()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_(not is_frozen)
    with Watched() as seen:
        logprobs, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=T)
        logprobs.sum().backward()
    assert seen.num_products == (2 if is_frozen else 4)


def test_bfloat16_gradient_is_within_rounding_of_the_exact_one():
    hidden, weight, targets = make_inputs(torch.bfloat16)
    hidden.requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=8)
    logprobs.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    oracle(exact, weight.double(), targets, 1.0)[0].sum().backward()
    assert hidden.grad is not None and exact.grad is not None
    # Logits of magnitude ~16 round by up to 2^-5 in bfloat16: probabilities, hence gradients, move by a few
    # percent at most.
    error = (hidden.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 3e-2
    assert logprobs.dtype is torch.float32


def test_extreme_logits_stay_finite():
    hidden, weight, targets = make_inputs()
    logprobs, entropy = token_logprobs(hidden * 1e4, weight, targets, temperature=1.0, chunk_tokens=8)
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all()


def test_zero_rows_run_forward_and_backward():
    hidden, weight, targets = make_inputs()
    hidden, weight = hidden[:0].clone().requires_grad_(), weight.requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, targets[:0], temperature=1.0, chunk_tokens=8)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, H) and not weight.grad.any()


def test_no_tensor_holds_more_than_one_chunk_of_logits():
    hidden, weight, targets = make_inputs()
    # The backward pass runs in autograd's own thread state, which sees the mode as well on a CPU.
    hidden.requires_grad_()
    with Watched() as seen:
        logprobs, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=5)
        logprobs.sum().backward()
    # weight.t() is (H, V): a view of the head, with H = 16 rows.
    assert seen.max_rows == H
    with Watched() as seen:
        token_logprobs(hidden[:, :4].contiguous(), weight[:, :4].contiguous(), targets, temperature=1.0, chunk_tokens=5)
    assert seen.max_rows == 5
