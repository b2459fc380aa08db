"""Packed expert weights to the compute dtype, at the speed of memory.

    int4   compressed-tensors "pack-quantized": element i of a row is bits 4*(i%8)..+3 of int32 word i//8, stored as
           q + 8; one bfloat16 scale per 32 elements; value = q * scale, rounded once
    mxfp4  OCP microscaling (gpt-oss): two e2m1 values per byte, low nibble first; one e8m0 scale (2^(s-127)) per 32

Owns the two bit layouts. Bitwise equal to compressed_tensors' decompress and to transformers'
convert_moe_packed_tensors (before its transposition). Offsets are 64-bit: a layer of experts has over 2^31 elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.trainer.kernels.launch import by_device, cdiv, programs

GROUP = 32
"""Elements under one scale, in both formats."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the eight codes; bit 3 is the sign."""
WORDS_A_PROGRAM = 1024


def dequantize_int4_torch(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Unpack and scale. Returns out.

    Args:
        packed: int32 [..., K / 8], contiguous.
        scale: bfloat16 [..., K / 32], contiguous.
        out: [..., K], contiguous, any float dtype.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    values = ((packed[..., None] >> shifts) & 0xF) - 8
    grouped = values.flatten(-2).unflatten(-1, (-1, GROUP)).float() * scale[..., None].float()
    return out.copy_(grouped.flatten(-2))


def dequantize_mxfp4_torch(blocks: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Unpack and scale. Returns out.

    Args:
        blocks: uint8 [..., K / 32, 16], contiguous.
        scales: uint8 [..., K / 32], contiguous.
        out: [..., K], contiguous, any float dtype.
    """
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=blocks.device)
    codes = torch.stack([blocks & 0xF, blocks >> 4], -1).flatten(-2)
    values = torch.ldexp(table[codes.long()], scales.int()[..., None] - 127)
    return out.copy_(values.flatten(-2))


def dequantize_int4_triton(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    return _launched(packed, scale, out, is_int4=True)


def dequantize_mxfp4_triton(blocks: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    return _launched(blocks.view(torch.int32), scales, out, is_int4=False)


def _launched(words: Tensor, scale: Tensor, out: Tensor, *, is_int4: bool) -> Tensor:
    num_words = words.numel()
    programs(_dequantize, (cdiv(num_words, WORDS_A_PROGRAM),))(
        words, scale, out, num_words, IS_INT4=is_int4, WORDS_A_GROUP=GROUP // 8, BLOCK=WORDS_A_PROGRAM, num_warps=4
    )  # fmt: skip
    return out


dequantize_int4 = by_device(dequantize_int4_torch, dequantize_int4_triton)
dequantize_mxfp4 = by_device(dequantize_mxfp4_torch, dequantize_mxfp4_triton)


@triton.jit
def _interleave8(v0, v1, v2, v3, v4, v5, v6, v7, BLOCK: tl.constexpr):
    """Eight vectors -> one, v0[0] v1[0] ... v7[0] v0[1] ..., so a thread holds its word's eight values together."""
    low = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    high = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(low, high), [BLOCK * 8])


@triton.jit
def _value(words, shift: tl.constexpr, scale, dtype: tl.constexpr, IS_INT4: tl.constexpr):
    """The bits of an e2m1 code, put where float32 has sign, exponent and mantissa, are its value * 2^-126."""
    code = words >> shift
    if IS_INT4:
        value = ((code & 0xF) - 8).to(tl.float32)
    else:
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (value * scale).to(dtype)


@triton.jit
def _dequantize(
    words_ptr, scale_ptr, out_ptr, num_words, IS_INT4: tl.constexpr, WORDS_A_GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < num_words
    words = tl.load(words_ptr + at, mask=inside, other=0)
    if IS_INT4:
        scale = tl.load(scale_ptr + at // WORDS_A_GROUP, mask=inside, other=0.0).to(tl.float32)
    else:
        exponent = tl.load(scale_ptr + at // WORDS_A_GROUP, mask=inside, other=127).to(tl.int32)
        # 2^(s - 127): s is float32's own biased exponent; s = 0 is the subnormal 2^-127; s = 255 (not a number) is inf.
        scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values = _interleave8(
        _value(words, 0, scale, dtype, IS_INT4), _value(words, 4, scale, dtype, IS_INT4),
        _value(words, 8, scale, dtype, IS_INT4), _value(words, 12, scale, dtype, IS_INT4),
        _value(words, 16, scale, dtype, IS_INT4), _value(words, 20, scale, dtype, IS_INT4),
        _value(words, 24, scale, dtype, IS_INT4), _value(words, 28, scale, dtype, IS_INT4), BLOCK,
    )  # fmt: skip
    elements = first * 8 + tl.arange(0, BLOCK * 8)
    tl.store(out_ptr + elements, values, mask=elements // 8 < num_words)
