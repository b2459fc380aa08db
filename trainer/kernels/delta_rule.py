"""Gated delta rule: linear attention with a decaying state, in chunks of torch operations that autograd differentiates.

    S_t = exp(g_t) S_{t-1} + k_t^T u_t,   u_t = beta_t (v_t - k_t exp(g_t) S_{t-1}),   o_t = q_t S_t

Owns the recurrence of one padded batch, and the short convolution before it over packed tokens. Everything is float32
inside. Chunks as in Yang et al. 2024 (https://arxiv.org/abs/2412.06464, section 3.3): inside a chunk the u of all
tokens are one triangular solve, and only states go from chunk to chunk.

Shapes: B sequences, N heads, L tokens of the longest, C tokens of a chunk, K key width, V value width; T packed tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
L2_EPS = 1e-6
"""Added to the squares of a query's or key's elements, as fla's kernels do."""


def gated_delta_rule(q_BNLK: Tensor, k_BNLK: Tensor, v_BNLV: Tensor, decay_BNL: Tensor, beta_BNL: Tensor) -> Tensor:
    """What every token reads from the state, which is 0 before each sequence: [B, N, L, V], float32. Tokens after a
    sequence's end change none before them.

    Args:
        q_BNLK, k_BNLK: queries and keys before they are normed.
        decay_BNL: g, log of the decay, at most 0.
        beta_BNL: how much of the value is written, 0 to 1.
    """
    length = q_BNLK.shape[2]
    added = -length % CHUNK
    q, k = (_unit(x.float()) for x in (q_BNLK, k_BNLK))
    q, k, v = (
        F.pad(x, (0, 0, 0, added)).unflatten(2, (-1, CHUNK)) for x in (q * q.shape[-1] ** -0.5, k, v_BNLV.float())
    )
    decay, beta = (F.pad(x.float(), (0, added)).unflatten(2, (-1, CHUNK)) for x in (decay_BNL, beta_BNL))
    total = decay.cumsum(-1)  # log of what is left of a state at a token, since the chunk's start
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    written, seen = k * beta[..., None], total.exp()[..., None]
    system = (written @ k.transpose(-1, -2)) * between
    wanted = torch.cat((v * beta[..., None], written * seen), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    inside, from_state = (q @ k.transpose(-1, -2)) * between, q * seen
    into_state, left = k * (total[..., -1:] - total).exp()[..., None], total[..., -1].exp()[..., None, None]
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for chunk in range(q.shape[2]):
        update = values[:, :, chunk] - reads[:, :, chunk] @ state
        out.append(from_state[:, :, chunk] @ state + inside[:, :, chunk] @ update)
        state = state * left[:, :, chunk] + into_state[:, :, chunk].transpose(-1, -2) @ update
    return torch.cat(out, dim=2)[:, :, :length]


def short_convolution(x_TC: Tensor, weight_CK: Tensor, positions_T: Tensor) -> Tensor:
    """Causal convolution of each channel over its own sequence: K tokens, the last of them itself. [T, C], float32.

    Args:
        weight_CK: the last column is the token's own.
        positions_T: position of each token in its sequence; no token sees more than that many before it.
    """
    x_TC, weight_CK = x_TC.float(), weight_CK.float()
    out_TC = x_TC * weight_CK[:, -1]
    for back in range(1, min(weight_CK.shape[1], x_TC.shape[0])):
        earlier_TC = F.pad(x_TC[:-back], (0, 0, back, 0)) * (positions_T >= back)[:, None]
        out_TC = out_TC + earlier_TC * weight_CK[:, -1 - back]
    return out_TC


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
