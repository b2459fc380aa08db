"""How merged weights are rounded to an engine's format without losing the update: up or down by a fixed threshold.

A step of LoRA changes most weights by less than half the distance of two bfloat16 values, so that rounding to nearest
gives back the base, and engines sample from a policy that has hardly learned. Here a value between two neighbours goes
up if the share of the way that it has gone is above its threshold, which is uniform in [0, 1): the mean of what engines
get is the value (stochastic rounding: Croci et al. 2022, https://doi.org/10.1098/rsos.211631, section 2). A threshold
belongs to an element of a parameter for the whole run, so that equal values give equal bits, and few elements change
from version to version.

rounding_kernel.py, merge_kernel.py and fp8_kernels.py repeat these torch operations, bit by bit.

Invariant: a threshold depends on the run's seed, the name of the parameter, and the element's row and column in the
parameter as it is over all ranks. It does not depend on how ranks cut it, on what an engine asks for, or on a resume.

Shapes: R rows, N columns.
"""

import hashlib

import torch
from torch import Tensor

KEY_BITS = 31
"""Positive as int32, as which Triton passes it."""
ROW_FACTOR, COLUMN_FACTOR = 0x9E3779B1, 0x85EBCA77
MIX_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
"""MurmurHash3's finalizer (Appleby, public domain) multiplies by these, so that every input bit changes the output."""

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


def key_of(seed: int, parameter: str) -> int:
    """The part of a threshold that a whole parameter shares; `parameter` is its name in the decoder."""
    digest = hashlib.blake2b(f"{seed} {parameter}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & ((1 << KEY_BITS) - 1)


def dithered(values_RN: Tensor, thresholds_RN: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 values to bfloat16, whose bits are the upper half of float32's. NaN stays NaN.

    Args:
        dtype: bfloat16 or float8_e4m3fn; values of the latter must be within +-FP8_MAX.

    Returns:
        Values of `dtype`, as float32.
    """
    if dtype is torch.float8_e4m3fn:
        return _dithered_fp8(values_RN, thresholds_RN)
    assert dtype is torch.bfloat16, dtype
    return _cut(values_RN, thresholds_RN, 16)


def thresholds(key: int, rows_R: Tensor, columns: range) -> Tensor:
    """32 random bits of each element, as int32.

    Args:
        rows_R: Int64; rows of the parameter over all ranks, those of a stack of matrices counted through the stack.
    """
    rows_R = rows_R * ROW_FACTOR + key
    columns_N = torch.arange(columns.start, columns.stop, device=rows_R.device).mul_(COLUMN_FACTOR)
    return _mix(_mix(_int32(rows_R))[:, None] ^ _int32(columns_N))


def rounded_sum(values_TN: Tensor, added_TN: Tensor) -> Tensor:
    """bfloat16 values plus float32 ones, rounded up or down so that the mean of many sums is theirs.

    Rounded to nearest, a sum would be the first number again wherever the second is less than half a step of it. The
    threshold comes from the bits of both addends and the column: the sum does not depend on where a row stands.
    Adding 0 changes nothing.

    Returns:
        Float32 that bfloat16 holds.
    """
    values_TN, added_TN = values_TN.float(), added_TN.float()
    columns_N = torch.arange(values_TN.shape[-1], device=values_TN.device).mul_(COLUMN_FACTOR)
    bits_TN = added_TN.view(torch.int32) + values_TN.view(torch.int32) * _signed(ROW_FACTOR)
    return _cut(values_TN + added_TN, _mix(bits_TN ^ _int32(columns_N)), 16)


def _mix(bits: Tensor) -> Tensor:
    """MurmurHash3's finalizer on int32: products wrap around, and shifts must not bring copies of the sign."""
    bits = bits ^ _shifted(bits, 16)
    bits.mul_(_signed(MIX_FACTORS[0]))
    bits.bitwise_xor_(_shifted(bits, 13))
    bits.mul_(_signed(MIX_FACTORS[1]))
    return bits.bitwise_xor_(_shifted(bits, 16))


def _shifted(bits: Tensor, count: int) -> Tensor:
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _int32(values: Tensor) -> Tensor:
    """The low 32 bits of int64."""
    return values.view(torch.int32).view(*values.shape, 2)[..., 0].contiguous()


def _signed(factor: int) -> int:
    return factor - (1 << 32) if factor >= 1 << 31 else factor


def _cut(values: Tensor, thresholds_RN: Tensor, num_bits: int) -> Tensor:
    """Drop the lowest bits of float32 after a threshold of as many bits is added to them."""
    bits = values.view(torch.int32) + _shifted(thresholds_RN, 32 - num_bits)
    cut = bits.bitwise_and_(-(1 << num_bits)).view(torch.float32)
    return torch.where(values.isnan(), values, cut)


def _dithered_fp8(values: Tensor, thresholds_RN: Tensor) -> Tensor:
    """float8_e4m3fn keeps 3 of float32's 23 bits, and multiples of 2^-9 below 2^-6."""
    normal = _cut(values, thresholds_RN, 20)
    part = _shifted(thresholds_RN, 12).float().mul_(2.0**-20)
    small = values.abs().mul_(512.0).add_(part).floor_().mul_(2.0**-9).copysign_(values)
    return torch.where(values.abs() < 2.0**-6, small, normal).clamp_(-FP8_MAX, FP8_MAX)
