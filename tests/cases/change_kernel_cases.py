"""Cases of kernel_cases.py: what a publish that sends only changes computes."""

from typing import Any

import torch

from cases.kernel_inputs import is_tried
from slipstream.weight_sync import change_kernels, changes
from slipstream.weight_sync.change_kernels import Launch
from slipstream.weight_sync.changes import TILE, Chunk, Landed, num_tiles
from slipstream.weight_sync.merging import merge, merge_kernel
from slipstream.weight_sync.merging.merge_operands import MergeOperands


def bits(count: int, seed: int, device: str) -> torch.Tensor:
    """Random int16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator).to(torch.int16).to(device)


def launches_of(rows: list[list[Any]], sizes: list[int], device: str) -> tuple[Launch, ...]:
    """Tensors become their addresses."""
    plain = [[item.data_ptr() if isinstance(item, torch.Tensor) else item for item in row] for row in rows]
    return change_kernels.launches_of(plain, [num_tiles(2 * size) for size in sizes], device)


def case_changes(device: str) -> None:
    """Streams of chunks of all sizes and shares, packed and applied by the kernels, leave what was sent; faults in
    streams are found before anything is written."""
    sizes = [TILE + 1, 1, 5, 3 * TILE + 77, TILE - 1, TILE]
    for share in (0.0, 0.02, 0.5, 1.0):
        before = [bits(size, size, device) for size in sizes]
        chunks, wanted = [], []
        for size, was in zip(sizes, before, strict=True):
            drawn = torch.rand(size, generator=torch.Generator().manual_seed(size)) < share
            marks = torch.cat([drawn, drawn.new_ones(3)]).to(torch.uint8).to(device)[:size]  # others' marks come after
            now = torch.where(marks != 0, bits(size, size + 1, device), was)
            room = int(marks.sum()) + 2 * num_tiles(2 * size)
            chunks.append(Chunk(now, marks, torch.zeros(room, dtype=torch.int32, device=device)))
            wanted.append(now.clone())
        counts = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        rows = [[c.values, c.marks, c.stream, c.values.numel(), c.stream.numel()] for c in chunks]
        change_kernels.pack(launches_of(rows, sizes, device), counts, TILE)
        assert counts.tolist() == [int(chunk.marks.sum()) for chunk in chunks]
        for chunk, was, now in zip(chunks, before, wanted, strict=True):
            on_host = was.cpu()
            assert changes.apply([Landed(chunk.stream.cpu(), on_host)]) is None
            assert torch.equal(on_host, now.cpu()), "torch reads what the kernel wrote"
        landed = [Landed(chunk.stream, was) for chunk, was in zip(chunks, before, strict=True)]
        rows = [[one.stream, one.values, one.values.numel(), one.num_records] for one in landed]
        launches = launches_of(rows, sizes, device)
        assert change_kernels.check(launches, TILE).tolist() == [one.num_records for one in landed]
        change_kernels.apply(launches, TILE)
        assert all(torch.equal(one.values, now) for one, now in zip(landed, wanted, strict=True))


def case_changes_without_room(device: str) -> None:
    """A stream that does not fit its room says how many records there would be, and writes nothing past the room."""
    values, marks = bits(2 * TILE, 1, device), torch.ones(2 * TILE, dtype=torch.uint8, device=device)
    whole = torch.full((TILE,), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(1, dtype=torch.int32, device=device)
    change_kernels.pack(launches_of([[values, marks, whole, 2 * TILE, 500]], [2 * TILE], device), counts, TILE)
    assert counts.item() == 2 * TILE
    assert (whole[500:] == -1).all()


def case_changes_out_of_bounds(device: str) -> None:
    """Each fault of a stream is told by a negative number or a wrong one. One that comes after the check makes no write
    outside the chunk."""
    size = TILE + 10
    marks = torch.zeros(size, dtype=torch.uint8, device=device)
    marks[::7] = 1
    room = int(marks.sum()) + 4
    sound = torch.zeros(room, dtype=torch.int32, device=device)
    counts = torch.zeros(1, dtype=torch.int32, device=device)
    values = bits(size, 2, device)
    change_kernels.pack(launches_of([[values, marks, sound, size, room]], [size], device), counts, TILE)
    last_tile = 4 + int(sound[2])
    faults = {
        "a start below the records": (0, -1), "a start past them": (2, room), "a negative count": (1, -5),
        "a count past a tile": (1, TILE + 1), "a record lost": (1, int(sound[1]) - 1),
        "a position past the chunk": (last_tile, 10 << 16), "a position past the tile": (4, TILE << 16),
        "a negative position": (4, -(1 << 16)),
    }  # fmt: skip
    for name, (place, value) in faults.items():
        stream = sound.clone()
        stream[place] = value
        launches = launches_of([[stream, values, size, room - 4]], [size], device)
        assert change_kernels.check(launches, TILE).item() != room - 4, name
        assert changes.apply([Landed(stream.cpu(), values.cpu().clone())]) == 0, name
        held = bits(3 * TILE, 3, device)
        live = held[TILE - 20 :][:size]
        edges = held[: TILE - 20].clone(), held[TILE - 20 + size :].clone()
        change_kernels.apply(launches_of([[stream, live, size, room - 4]], [size], device), TILE)
        assert torch.equal(held[: TILE - 20], edges[0]) and torch.equal(held[TILE - 20 + size :], edges[1]), name


def case_merge_and_mark(device: str) -> None:
    """Values are those without marks, and marks say where two results differ in a bit; any bands, cuts and strides."""
    generator = torch.Generator().manual_seed(0)
    rows, columns, rank = 70, 40, 5
    base = (torch.randn(3 * rows, columns, generator=generator) * 0.1).bfloat16().to(device)
    b = torch.randn(3 * rows, rank, generator=generator).to(device)
    a = (torch.randn(3, rank, columns, generator=generator) * 1e-3).to(device)
    last_b, last_a = b + 0.02 * torch.randn(b.shape, generator=generator).to(device), a.clone()
    for i, key in enumerate((None, 77)):
        for j, (first, stop, left, right) in enumerate(((0, 210, 0, 40), (65, 150, 8, 39), (139, 141, 0, 1))):
            skipped, place = divmod(first, rows)
            given = [
                MergeOperands(
                    base[first:stop, left:right][None], some_b[first:stop][None], some_a[skipped:], 2.0, place, rows,
                    first_column=left, key=key, stack_row=skipped * rows,
                )
                for some_b, some_a in ((b, a), (last_b, last_a))
            ]  # fmt: skip
            for is_transposed in (False, True):
                if not is_tried(device, i, j, is_transposed):
                    continue
                shape = (right - left, stop - first) if is_transposed else (stop - first, right - left)
                outs = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(3)]
                marks = torch.full(shape, 9, dtype=torch.uint8, device=device)
                now, last, marked, marks = (x.t()[None] if is_transposed else x[None] for x in (*outs, marks))
                for one, out in zip(given, (now, last), strict=True):
                    merge_kernel.merger(one, out)()
                merge_kernel.merger(given[0], marked, given[1], marks)()
                assert torch.equal(marked.view(torch.int16), now.view(torch.int16))
                wanted = now.view(torch.int16) != last.view(torch.int16)
                assert torch.equal(marks, wanted.to(torch.uint8)), (key, first, is_transposed)
    assert 0 < float(marks.float().mean()) < 1 or marks.numel() < 3
    if device == "cpu":  # the torch form, of the whole stack
        out = torch.zeros(1, 3 * rows, columns, dtype=torch.bfloat16)
        marks = torch.full(out.shape, 9, dtype=torch.uint8)
        whole = [
            MergeOperands(base[None], some_b[None], some_a, 2.0, 0, rows, key=77)
            for some_b, some_a in ((b, a), (last_b, last_a))
        ]
        merge.marker(whole[0], whole[1], out, marks)()
        both = [torch.zeros_like(out), torch.zeros_like(out)]
        for one, into in zip(whole, both, strict=True):
            merge.merger(one, into)()
        assert torch.equal(out, both[0])
        assert torch.equal(marks, (both[0] != both[1]).to(torch.uint8))
        assert 0.05 < float(marks.float().mean()) < 0.95
