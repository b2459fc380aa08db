"""ExpertActivation: the gated activation between an expert's two projections. Pure data, no torch.

    h = (clamp(up, -limit, limit) + up_offset) * g * sigmoid(alpha * (g + cubic * g^3)),   g = min(gate, limit)

Any other formula needs a change in trainer/kernels/experts/swiglu.py, which computes this one.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivation:
    """One member of the family."""

    alpha: float = 1.0
    cubic: float = 0.0
    limit: float | None = None
    """Bound on gate (above) and up (both sides) before anything else; None: none."""
    up_offset: float = 0.0
    rounds_each: bool = False
    """Gate and up are rounded to the compute dtype before the activation, and its result before the product (without a
    limit), as in vLLM's kernels; else only h is."""


SWIGLU = ExpertActivation()
"""silu(gate) * up (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""
GELU_TANH = ExpertActivation(alpha=math.sqrt(8 / math.pi), cubic=0.044715)
"""gelu(gate) * up, in GELU's approximation by tanh: 0.5 * (1 + tanh(x)) is sigmoid(2x) (Gemma 4)."""
CLAMPED_SWIGLU = ExpertActivation(alpha=1.702, limit=7.0, up_offset=1.0)
"""gpt-oss (transformers models/gpt_oss)."""
