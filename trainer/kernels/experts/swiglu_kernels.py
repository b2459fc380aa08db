"""The kernels of an expert's activation, with the adapters around it: swiglu.py has their formulas, and launches them.

Invariant: a program handles rows of one expert. Without a limit, a bend or an adapter it computes none of theirs.
"""

import triton
import triton.language as tl


@triton.jit
def _part_of_tile(tiles_ptr, index, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first row and one past the last row of part `index`, when each tile is cut into PARTS parts of BLOCK_M
    rows. So kernels with smaller tiles read the same table."""
    tile = tiles_ptr + index // PARTS * 3
    first = tl.load(tile + 1) + index % PARTS * BLOCK_M
    return tl.load(tile).to(tl.int64), first, tl.minimum(tl.load(tile + 2), first + BLOCK_M)


@triton.jit
def _adapted_tile(
    gu_ptr, b_ptr, xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
    RANK: tl.constexpr, HAS_LORA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of gate or up in float32, and the tile of B that it used. Pointers point to that half of the expert."""
    tile = tl.load(gu_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = xa
    if HAS_LORA:
        b = _factor_tile(b_ptr, columns, is_column, ranks, b_row_stride, b_rank_stride, RANK).to(xa.dtype)
        tile = tl.dot(xa, tl.trans(b), tile, input_precision=PRECISION)
    return tile, b


@triton.jit
def _factor_tile(ptr, rows, is_row, ranks, row_stride, rank_stride, RANK: tl.constexpr):
    at = rows[:, None] * row_stride + ranks[None, :] * rank_stride
    return tl.load(ptr + at, mask=is_row[:, None] & (ranks < RANK)[None, :], other=0.0)


@triton.jit
def _gated_tile(
    gate, up, ALPHA: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr
):  # fmt: skip
    """Three factors: h is the product of the first two, dh/dgate the third times up, without gradients of clamps."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    bent, steep = gate, 1.0
    if CUBIC != 0.0:
        bend = CUBIC * gate * gate
        bent, steep = gate * (1 + bend), 1 + 3 * bend
    sigmoid = tl.sigmoid(ALPHA * bent)
    glu = gate * sigmoid
    return up + UP_OFFSET, glu, sigmoid + ALPHA * glu * (1 - sigmoid) * steep


@triton.jit
def activate_rows(
    gu_ptr, xa_ptr, h_ptr, ha_ptr, tiles_ptr, width,
    b_ptr, b_expert_stride, b_row_stride, b_rank_stride, a_ptr, a_expert_stride, a_rank_stride, a_column_stride, scale,
    ALPHA: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, HAS_LORA: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TABLE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    ROUNDS_EACH: tl.constexpr,
) -> None:  # fmt: skip
    expert, first, stop = _part_of_tile(tiles_ptr, tl.program_id(0), TABLE_ROWS // BLOCK_M, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    if first < stop:
        rows = tl.arange(0, BLOCK_M)
        is_row = rows < stop - first
        begin = first.to(tl.int64)
        gu_ptr += begin * 2 * width
        h_ptr += begin * width
        ranks = tl.arange(0, PADDED_RANK)
        low_at = rows[:, None] * RANK + ranks[None, :]
        is_low = is_row[:, None] & (ranks < RANK)[None, :]
        xa = tl.load(xa_ptr + begin * RANK + low_at, mask=is_low, other=0.0) if HAS_LORA else 0.0
        if HAS_LORA:
            b_ptr += expert * b_expert_stride
            a_ptr += expert * a_expert_stride
        ha = tl.zeros([BLOCK_M, PADDED_RANK], dtype=tl.float32)
        for start in tl.range(0, width, BLOCK_N, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_N)
            is_column = columns < width
            inside = is_row[:, None] & is_column[None, :]
            at = rows[:, None] * (2 * width) + columns[None, :]
            gate, _ = _adapted_tile(
                gu_ptr, b_ptr, xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
                RANK, HAS_LORA, PRECISION,
            )  # fmt: skip
            up, _ = _adapted_tile(
                gu_ptr + width, b_ptr + width * b_row_stride if HAS_LORA else None,
                xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
                RANK, HAS_LORA, PRECISION,
            )  # fmt: skip
            if ROUNDS_EACH:
                gate, up = gate.to(h_ptr.dtype.element_ty).to(tl.float32), up.to(h_ptr.dtype.element_ty).to(tl.float32)
            up, glu, _ = _gated_tile(gate, up, ALPHA, CUBIC, LIMIT, UP_OFFSET)
            if ROUNDS_EACH and LIMIT is None:
                glu = glu.to(h_ptr.dtype.element_ty).to(tl.float32)
            h = (up * glu).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + rows[:, None] * width + columns[None, :], h, mask=inside)
            if HAS_LORA:
                a = _factor_tile(a_ptr, columns, is_column, ranks, a_column_stride, a_rank_stride, RANK)
                ha = tl.dot(h, a.to(h.dtype), ha, input_precision=PRECISION)
        if HAS_LORA:
            tl.store(ha_ptr + begin * RANK + low_at, (ha * scale).to(ha_ptr.dtype.element_ty), mask=is_low)


@triton.jit
def activate_rows_backward(
    gu_ptr, xa_ptr, dh_ptr, db_ptr, weights_ptr, dgu_ptr, hw_ptr, dw_ptr, dba_ptr, tiles_ptr, width,
    b_ptr, b_expert_stride, b_row_stride, b_rank_stride, a_ptr, a_expert_stride, a_rank_stride, a_column_stride, scale,
    ALPHA: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    NEEDS_H: tl.constexpr, HAS_LORA: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TABLE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """dgu may overwrite gu, and hw may overwrite dh: one program reads and writes each element.

    Stores have pointers of their own. Otherwise the loop, which loads ahead, would keep those addresses in registers
    until it stores there, and fewer thread blocks would fit.
    """
    expert, first, stop = _part_of_tile(tiles_ptr, tl.program_id(0), TABLE_ROWS // BLOCK_M, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    if first < stop:
        rows = tl.arange(0, BLOCK_M)
        is_row = rows < stop - first
        begin = first.to(tl.int64)
        gu_ptr += begin * 2 * width
        dgu_ptr += begin * 2 * width
        dh_ptr += begin * width
        hw_ptr += begin * width
        ranks = tl.arange(0, PADDED_RANK)
        low_at = rows[:, None] * RANK + ranks[None, :]
        is_low = is_row[:, None] & (ranks < RANK)[None, :]
        xa = tl.load(xa_ptr + begin * RANK + low_at, mask=is_low, other=0.0) if HAS_LORA else 0.0
        db = tl.load(db_ptr + begin * RANK + low_at, mask=is_low, other=0.0) if HAS_LORA else 0.0
        if HAS_LORA:
            b_ptr += expert * b_expert_stride
            a_ptr += expert * a_expert_stride
        weight = tl.load(weights_ptr + begin + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        dba = tl.zeros([BLOCK_M, PADDED_RANK], dtype=tl.float32)
        dw = tl.zeros([BLOCK_M], dtype=tl.float32)
        for start in tl.range(0, width, BLOCK_N, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_N)
            is_column = columns < width
            inside = is_row[:, None] & is_column[None, :]
            at = rows[:, None] * (2 * width) + columns[None, :]
            gate_in, b_gate = _adapted_tile(
                gu_ptr, b_ptr, xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
                RANK, HAS_LORA, PRECISION,
            )  # fmt: skip
            up_in, b_up = _adapted_tile(
                gu_ptr + width, b_ptr + width * b_row_stride if HAS_LORA else None,
                xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
                RANK, HAS_LORA, PRECISION,
            )  # fmt: skip
            h_at = rows[:, None] * width + columns[None, :]
            dh = tl.load(dh_ptr + h_at, mask=inside, other=0.0).to(tl.float32)
            if HAS_LORA:
                a = _factor_tile(a_ptr, columns, is_column, ranks, a_column_stride, a_rank_stride, RANK)
                dh = tl.dot(db, tl.trans(a.to(db.dtype)), dh, input_precision=PRECISION)
            up, glu, slope = _gated_tile(gate_in, up_in, ALPHA, CUBIC, LIMIT, UP_OFFSET)
            h = up * glu
            dw += tl.sum(h * dh, 1)
            dh *= weight
            dgate, dup = dh * up * slope, dh * glu
            if LIMIT is not None:
                dgate = tl.where(gate_in <= LIMIT, dgate, 0.0)
                dup = tl.where(tl.abs(up_in) <= LIMIT, dup, 0.0)
            dgate, dup = dgate.to(dgu_ptr.dtype.element_ty), dup.to(dgu_ptr.dtype.element_ty)
            tl.store(dgu_ptr + at, dgate, mask=inside)
            tl.store(dgu_ptr + width + at, dup, mask=inside)
            if NEEDS_H:
                tl.store(hw_ptr + h_at, (weight * h).to(hw_ptr.dtype.element_ty), mask=inside)
            if HAS_LORA:
                dba = tl.dot(dgate, b_gate, dba, input_precision=PRECISION)
                dba = tl.dot(dup, b_up, dba, input_precision=PRECISION)
        tl.store(dw_ptr + begin + rows, dw, mask=is_row)
        if HAS_LORA:
            tl.store(dba_ptr + begin * RANK + low_at, (dba * scale).to(dba_ptr.dtype.element_ty), mask=is_low)
