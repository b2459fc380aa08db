"""Log-probability of one column, log-normalizer and entropy of every row of logits, and the logits' gradient.

    logprob = x[target] - z      z = log sum exp x      entropy = z - sum p x      x = logits / temperature
    gradient = ((onehot(target) - p) * g - p (x - z + entropy) * h) / temperature      p = exp(x - z)

g is the gradient of the log-probability, h that of the entropy.

Invariant: 16-bit logits are never widened in memory. Forward reads them once; backward reads them once and overwrites
them. Arithmetic is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.trainer.kernels.launch import by_device, programs

BLOCK = 4096


def log_softmax_torch(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities at the targets, log-normalizers and entropies (nats), float32. Copies the logits once, widened.

    Args:
        logits_CV: contiguous.
    """
    work_CV = logits_CV.to(torch.float32, copy=True).div_(temperature)
    max_C = work_CV.amax(dim=-1)
    work_CV.sub_(max_C.unsqueeze(-1))
    target_logits_C = work_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    sum_exp_C = work_CV.exp_().sum(dim=-1)
    log_sum_exp_C = sum_exp_C.log()
    work_CV.div_(sum_exp_C.unsqueeze(-1))
    entropy_C = torch.special.entr(work_CV, out=work_CV).sum(dim=-1)
    return target_logits_C - log_sum_exp_C, max_C + log_sum_exp_C, entropy_C


def logits_gradient_torch(
    logits_CV: Tensor,
    targets_C: Tensor,
    normalizers_C: Tensor,
    grads_C: Tensor,
    temperature: float,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The gradient of the logits, in their dtype, from that of the log-probabilities. May overwrite the logits.

    Args:
        logits_CV, targets_C, temperature: as in `log_softmax`.
        normalizers_C: as `log_softmax` returned them.
        grads_C: float32.
        entropy: entropies, as `log_softmax` returned them, and their gradients, float32. None: they have no gradient.
    """
    scale_C = (grads_C.float() / temperature).unsqueeze(-1)
    work_CV = logits_CV.float().div_(temperature)  # in place if it is float32
    work_CV.sub_(normalizers_C.unsqueeze(-1))
    if entropy is None:
        work_CV.exp_().mul_(-scale_C)
    else:
        entropy_C, entropy_grads_C = (one.float().unsqueeze(-1) for one in entropy)
        factor_CV = (work_CV + entropy_C).mul_(entropy_grads_C / temperature).add_(scale_C)
        work_CV.exp_().mul_(factor_CV.neg_())
    work_CV.scatter_add_(-1, targets_C.unsqueeze(-1), scale_C)
    return work_CV.to(logits_CV.dtype)


def log_softmax_triton(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_columns = logits_CV.shape
    logprobs_C, normalizers_C, entropy_C = torch.empty(3, num_rows, device=logits_CV.device).unbind()
    if num_rows:
        programs(_log_softmax, (num_rows,))(
            logits_CV, targets_C, logprobs_C, normalizers_C, entropy_C, num_columns, 1.0 / temperature,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return logprobs_C, normalizers_C, entropy_C


def gradient_grid(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Programs of the gradient's kernel. Rows come first, because CUDA's second axis ends at 65,535."""
    return num_rows, -(-num_columns // BLOCK)


def logits_gradient_triton(
    logits_CV: Tensor,
    targets_C: Tensor,
    normalizers_C: Tensor,
    grads_C: Tensor,
    temperature: float,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The same as logits_gradient_torch, by a kernel; writes over the logits."""
    num_rows, num_columns = logits_CV.shape
    entropy_C, entropy_grads_C = (normalizers_C, normalizers_C) if entropy is None else entropy
    if num_rows:
        programs(_logits_gradient, gradient_grid(num_rows, num_columns))(
            logits_CV, targets_C, normalizers_C, grads_C.contiguous(), entropy_C, entropy_grads_C.contiguous(),
            num_columns, 1.0 / temperature, HAS_ENTROPY=entropy is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return logits_CV


log_softmax = by_device(log_softmax_torch, log_softmax_triton)
logits_gradient = by_device(logits_gradient_torch, logits_gradient_triton)


@triton.jit
def _log_softmax(
    logits_ptr, targets_ptr, logprobs_ptr, normalizers_ptr, entropy_ptr, num_columns, sharpness, BLOCK: tl.constexpr
):
    """One pass: the running maximum m, sum of exp(x - m), and sum of exp(x - m) (x - m)."""
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * num_columns
    highest = -1e30
    total = 0.0
    weighted = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        x = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32) * sharpness
        x = tl.where(inside, x, -1e30)
        higher = tl.maximum(highest, tl.max(x, 0))
        shrink = tl.exp(highest - higher)
        x -= higher
        p = tl.exp(x)
        weighted = shrink * (weighted + (highest - higher) * total) + tl.sum(tl.where(inside, p * x, 0.0), 0)
        total = shrink * total + tl.sum(p, 0)
        highest = higher
    normalizer = highest + tl.log(total)
    target = tl.load(at + tl.load(targets_ptr + row)).to(tl.float32) * sharpness
    tl.store(logprobs_ptr + row, target - normalizer)
    tl.store(normalizers_ptr + row, normalizer)
    tl.store(entropy_ptr + row, tl.log(total) - weighted / total)


@triton.jit
def _logits_gradient(
    logits_ptr, targets_ptr, normalizers_ptr, grads_ptr, entropy_ptr, entropy_grads_ptr, num_columns, sharpness,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    at = logits_ptr + row * num_columns + columns
    scale = tl.load(grads_ptr + row) * sharpness
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * sharpness
    log_p = x - tl.load(normalizers_ptr + row)
    p = tl.exp(log_p)
    hit = (columns == tl.load(targets_ptr + row)).to(tl.float32)
    gradient = (hit - p) * scale
    if HAS_ENTROPY:
        slope = tl.load(entropy_grads_ptr + row) * sharpness
        gradient -= p * (log_p + tl.load(entropy_ptr + row)) * slope
    tl.store(at, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
