"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and its scaled variants, as in
transformers.

Frequencies are computed in float32 on the device of the positions, as an engine does on its own: a power may differ by
an ulp between devices, which is 1e-3 of an angle at position 16,384. Angles are float32; cosines and sines are cast to
the compute dtype before they are used, but for a family whose engines do not (RopeSpec.is_wide) where
Roundings.rotation=once.
"""

import math

import torch
from torch import Tensor

from slipstream.conf.architecture.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from slipstream.conf.schema import Rounding


class RotaryEmbedding:
    """Cosines and sines of packed positions. Holds no parameters and no buffers, hence nothing on meta."""

    def __init__(self, spec: RopeSpec, rotation: Rounding = Rounding.each) -> None:
        self._spec, self._is_wide = spec, spec.is_wide and rotation is Rounding.once
        self._factor = spec.scaling.cos_sin_factor if isinstance(spec.scaling, YarnScaling) else 1.0
        self._inverse_frequencies = _inverse_frequencies(spec, torch.device("cpu"))

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of shape [T, 1, dim / 2], one angle per pair (the middle dim broadcasts over heads)."""
        if self._inverse_frequencies.device != positions_T.device:
            self._inverse_frequencies = _inverse_frequencies(self._spec, positions_T.device)
        dtype = torch.promote_types(dtype, torch.float32) if self._is_wide else dtype
        angles = (positions_T.float()[:, None] * self._inverse_frequencies)[:, None]
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def _inverse_frequencies(spec: RopeSpec, device: torch.device) -> Tensor:
    """[dim / 2], computed on `device`."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64, device=device).float() / spec.dim
    powers = spec.theta**exponents
    if spec.scaling is None:
        return 1.0 / powers
    if isinstance(spec.scaling, LinearScaling):
        return 1.0 / powers / spec.scaling.factor
    if isinstance(spec.scaling, ProportionalScaling):
        turning = torch.arange(len(powers), device=device) < int(spec.scaling.share * spec.dim // 2)
        return torch.where(turning, 1.0 / powers, 0.0)
    return _yarn(powers, spec) if isinstance(spec.scaling, YarnScaling) else _llama3(1.0 / powers, spec)


def _llama3(extrapolated: Tensor, spec: RopeSpec) -> Tensor:
    """Frequencies of long waves are divided by `factor`, those of short waves stay, with a ramp between."""
    scaling = spec.scaling
    assert isinstance(scaling, Llama3Scaling)
    wavelength = 2 * math.pi / extrapolated
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    kept = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    ramp = (1 - kept) * extrapolated / scaling.factor + kept * extrapolated
    scaled = torch.where(wavelength > longest, extrapolated / scaling.factor, ramp)
    return torch.where(wavelength < shortest, extrapolated, scaled)


def _yarn(powers: Tensor, spec: RopeSpec) -> Tensor:
    """Frequencies of fast dims stay, those of slow dims are divided by `factor`, with a ramp between."""
    yarn = spec.scaling
    assert isinstance(yarn, YarnScaling)

    def dim_of(rotations: float) -> float:
        """The dim that makes this many rotations over the original context."""
        return spec.dim * math.log(yarn.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_of(yarn.beta_fast), dim_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    dims = torch.arange(spec.dim // 2, dtype=torch.float32, device=powers.device)
    kept = 1 - ((dims - low) / (high - low)).clamp(0, 1)
    # As transformers and vLLM: 1 / (factor * power). The last bit of (1 / power) / factor may differ.
    return 1.0 / (yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept
