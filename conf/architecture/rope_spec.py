"""What a rotary embedding is built from. Pure data, no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071), with DeepSeek's two mscale factors."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """Multiplies cos and sin; None: from the other fields."""
    truncate: bool = True
    """Round the ends of the ramp to whole dims."""

    def mscale_of(self, mscale: float = 1.0) -> float:
        """0.1 * mscale * ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def cos_sin_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.mscale_of(self.mscale) / self.mscale_of(self.mscale_all_dim)
        return self.mscale_of()


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: slow dims are divided by `factor`, fast ones stay, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every position is divided by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """Gemma 4: pairs are those of the whole head, the first ones turn and the others stand still."""

    share: float
    """The part of the pairs that turns."""


RopeScaling = YarnScaling | Llama3Scaling | LinearScaling | ProportionalScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: which dims turn, how fast, and how they pair."""

    dim: int
    """Dims of a head that turn; the first ones where the head has more."""
    theta: float
    interleaved: bool = False
    """Dims 2i and 2i + 1 make a pair (DeepSeek); else dims i and i + dim / 2."""
    scaling: RopeScaling | None = None
    is_wide: bool = False
    """vLLM keeps cosines and sines in float32; torch.compile fuses the cast away: they are never rounded (gpt-oss)."""
