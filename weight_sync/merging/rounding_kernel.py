"""weight_sync.merging.rounding's operations for Triton kernels, bit by bit.

`rounded_sum` is for adapters: what a linear gives is rounded to bfloat16 before an adapter's product is added, and the
sum of it and less than half a step is that number again, if it is rounded to nearest.
"""

# pyright: basic
# Triton is untyped.
from __future__ import annotations

import triton
import triton.language as tl

from slipstream.weight_sync.merging import rounding

ROW_FACTOR, COLUMN_FACTOR, FIRST_MIX, SECOND_MIX = (
    tl.constexpr(factor) for factor in (rounding.ROW_FACTOR, rounding.COLUMN_FACTOR, *rounding.MIX_FACTORS)
)


@triton.jit
def mix(bits):
    """MurmurHash3's finalizer on uint32."""
    bits = (bits ^ (bits >> 16)) * FIRST_MIX
    bits = (bits ^ (bits >> 13)) * SECOND_MIX
    return bits ^ (bits >> 16)


@triton.jit
def cut_bits(values, thresholds, NUM_BITS: tl.constexpr):
    """Drop the lowest bits of float32 after a threshold of as many bits is added to them; NaN stays NaN."""
    bits = values.to(tl.uint32, bitcast=True) + (thresholds >> (32 - NUM_BITS))
    cut = ((bits >> NUM_BITS) << NUM_BITS).to(tl.float32, bitcast=True)
    return tl.where(values == values, cut, values)


@triton.jit
def rounded_sum(values, added, columns):
    """weight_sync.merging.rounding.rounded_sum of float32 tiles; `columns` are those of the whole tensor."""
    bits = added.to(tl.uint32, bitcast=True) + values.to(tl.uint32, bitcast=True) * ROW_FACTOR
    thresholds = mix(bits ^ (columns.to(tl.uint32) * COLUMN_FACTOR)[None, :])
    return cut_bits(values + added, thresholds, 16)
