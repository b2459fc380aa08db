"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split layout, as in transformers.

Frequencies are computed on the CPU in float32 (powers differ by an ulp between devices), angles in float32, and
cosines are cast to the compute dtype before they are used.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryEmbedding:
    """Cosines and sines of packed positions. Holds no parameters and no buffers, so nothing of it is ever on meta."""

    def __init__(self, head_dim: int, theta: float) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        self._inverse_frequencies = 1.0 / (theta**exponents)

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of shape [T, 1, head_dim] (the middle dim broadcasts over heads)."""
        if self._inverse_frequencies.device != positions_T.device:
            self._inverse_frequencies = self._inverse_frequencies.to(positions_T.device)
        angles = positions_T.float()[:, None] * self._inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotation to queries or keys: T tokens, N heads, D head_dim."""
    first, second = x_TND.chunk(2, dim=-1)
    return x_TND * cos + torch.cat((-second, first), dim=-1) * sin
