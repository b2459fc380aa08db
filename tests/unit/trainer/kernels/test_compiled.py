"""Promise of trainer/kernels: compiled for GPUs, kernels fit, and no copy overwrites what a product still reads.

Triton compiles here without a GPU, up to the point where it has allocated shared memory.
"""

import re
from collections.abc import Callable
from itertools import product
from unittest import mock

import pytest
import torch
from cases.only_compiles import OnlyCompiles, only_allocate
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from slipstream.conf.architecture.activation import SWIGLU
from slipstream.conf.schema import MAX_EXPERT_RANK
from slipstream.trainer.kernels.adamw_update import Codes, adamw_triton
from slipstream.trainer.kernels.experts import grouped_gemm, low_rank
from slipstream.trainer.kernels.experts.gather import gather_project_triton
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.experts.low_rank import (
    add_dense_low_rank_triton,
    add_low_rank_triton,
    low_rank_gradient_triton,
)
from slipstream.trainer.kernels.experts.swiglu import InnerAdapter, activate_backward_triton, activate_triton
from slipstream.trainer.moe.grouped import GroupedBackend, grouped_product
from slipstream.weight_sync import change_kernels
from slipstream.weight_sync.changes import TILE
from slipstream.weight_sync.merging import merge_kernel
from slipstream.weight_sync.merging.merge_operands import MergeOperands

BLOCK_SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""The most that a thread block gets, by compute capability."""
ONE_STEP_RANK = 64
"""The widest that a product takes in one step, whose memory the product's own steps do not get back."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, CompiledKernel]:
    """Name of a kernel -> its last launch in this test, which was compiled and not made."""
    found: dict[str, CompiledKernel] = {}

    def compiled(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            found[kernel.fn.__name__] = kernel.warmup(*args, grid=grid, **options)

        return launch

    monkeypatch.setattr(driver, "_active", OnlyCompiles())
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", only_allocate)
    monkeypatch.setattr(JITFunction, "__getitem__", compiled)
    return found


def launch_expert_kernels(dtype: torch.dtype, rank: int, factor_dtype: torch.dtype) -> None:
    """Every kernel of the routed experts whose work depends on the rank, once."""
    num_experts, num_rows, hidden, width = 4, 1024, 128, 256
    groups = RowGroups(torch.full((num_experts,), num_rows // num_experts), num_rows)
    rows, gu, h = (torch.zeros(num_rows, n, dtype=dtype) for n in (hidden, 2 * width, width))
    low, weights, source = torch.zeros(num_rows, rank, dtype=dtype), torch.zeros(num_rows), torch.arange(num_rows)
    a_gate_up, b_gate_up, a_down = (
        torch.zeros(num_experts, *shape, dtype=factor_dtype)
        for shape in ((rank, hidden), (2 * width, rank), (rank, width))
    )
    inner = InnerAdapter(b_gate_up, a_down, 1.0)
    gather_project_triton(rows, source, a_gate_up, groups, 1.0, None)
    activate_triton(gu, low, inner, groups, SWIGLU)
    activate_backward_triton(gu, low, inner, h, low, weights, groups, SWIGLU, True)
    for cut_from_rows in (num_rows + 1, 0):  # the cut kernel is the one that stays in `launched`
        with mock.patch.object(low_rank, "CUT_FROM_ROWS", cut_from_rows):
            low_rank_gradient_triton(low, rows, groups, torch.empty_like(a_gate_up), source, weights)
    add_low_rank_triton(gu, low, b_gate_up, None, groups)
    add_dense_low_rank_triton(gu, low, b_gate_up[0].to(dtype), 1.0)  # stays in `launched`


def launch_product(dtype: torch.dtype, num_rows: int, rank: int, *, is_turned: bool) -> None:
    """A grouped product with an adapter."""
    num_experts, hidden, width = 4, 128, 512
    groups = RowGroups(torch.full((num_experts,), num_rows // num_experts), num_rows)
    rows, weights = torch.zeros(num_rows, hidden, dtype=dtype), torch.zeros(num_experts, width, hidden, dtype=dtype)
    low, factors = torch.zeros(num_rows, rank, dtype=dtype), torch.zeros(num_experts, width, rank, dtype=dtype)
    matrices = weights.transpose(1, 2) if is_turned else weights.view(num_experts, hidden, width)
    grouped_product(rows, matrices, groups, GroupedBackend.triton, low_SR=low, p_ENR=factors)


def overwritten(ttgir: str) -> set[str]:
    """Buffers that a copy may overwrite while an earlier iteration's product reads them.

    A loop that loads L iterations ahead has made L copies into a buffer before it begins. If its products may run on
    while the next copy is made (a wait that leaves one pending), a buffer needs L + 1 places. Triton 3.6 and 3.7 count
    L where the loaded tile is stored or summed beside the product.
    """
    places: dict[str, int] = {}
    buffer_of: dict[str, str] = {}
    copies_before: dict[str, int] = {}
    loops: list[int] = []
    operands: set[str] = set()
    leaves_pending = False

    def buffer(name: str) -> str:
        while name in buffer_of:
            name = buffer_of[name]
        return name

    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if loops and indent == loops[-1] and line.lstrip().startswith("}"):
            loops.pop()
        if "scf.for" in line:
            loops.append(indent)
        if found := re.search(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", line):
            places[found[1]] = int(found[2])
        elif found := re.search(r"(%\S+) = ttg\.memdesc_(?:index|trans|subslice) (%[\w#-]+)", line):
            buffer_of[found[1]] = found[2]
        elif found := re.search(r"async_(?:tma_)?copy_global_to_local %[^ \[]+(?:\[.*?\]|,) (%[\w-]+)", line):
            copies_before[buffer(found[1])] = copies_before.get(buffer(found[1]), 0) + (not loops)
        elif loops and (found := re.search(r"warp_group_dot (%[\w#-]+), (%[\w#-]+),.*isAsync = true", line)):
            operands |= {buffer(found[1]), buffer(found[2])}
        elif loops and (found := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line)):
            leaves_pending |= int(found[1]) > 0
    if not leaves_pending:
        return set()
    return {name for name in operands & places.keys() if places[name] <= copies_before.get(name, 0)}


@pytest.mark.parametrize(
    ("dtype", "rank", "factor_dtype"),
    [
        (torch.float16, 16, torch.float32),
        (torch.float16, 64, torch.float32),
        (torch.float32, 32, torch.float32),
        (torch.float32, MAX_EXPERT_RANK, torch.float32),
        *product((torch.bfloat16,), (8, 32, 64, 128, 256, MAX_EXPERT_RANK), (torch.bfloat16, torch.float32)),
    ],
)
def test_kernels_of_every_rank_fit_into_a_blocks_shared_memory_and_no_copy_overwrites_what_a_product_still_reads(
    launched: dict[str, CompiledKernel], dtype: torch.dtype, rank: int, factor_dtype: torch.dtype
) -> None:
    """The last rank of each tiling, and rank 256; float32 factors take the most."""
    launch_expert_kernels(dtype, rank, factor_dtype)
    assert launched.keys() == {
        "_write_tiles", "_gather_project", "activate_rows", "activate_rows_backward",
        "_low_rank_gradient", "_add_parts", "_add_low_rank",
    }  # fmt: skip
    shared = {name: kernel.metadata.shared for name, kernel in launched.items()}
    assert max(shared.values()) <= BLOCK_SHARED_BYTES[OnlyCompiles.target], shared
    found = {name: overwritten(kernel.asm["ttgir"]) for name, kernel in launched.items()}
    assert not any(found.values()), found


@pytest.mark.parametrize("num_rows", [128, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", BLOCK_SHARED_BYTES)
def test_a_product_and_its_adapter_fit_and_no_copy_overwrites_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, launched: dict[str, CompiledKernel], target: int, dtype: torch.dtype, num_rows: int
) -> None:
    """Every tiling, both ways that weights lie; factors of the product's dtype, which take the most here. Before Hopper
    all ranks and both ways take the same.
    """
    monkeypatch.setattr(OnlyCompiles, "target", target)
    monkeypatch.setattr(grouped_gemm, "_capability", lambda device: target // 10)
    ways = [(rank, is_turned) for rank in (ONE_STEP_RANK, MAX_EXPERT_RANK) for is_turned in (True, False)]
    for rank, is_turned in ways if target == 90 else (ways[0], ways[-1]):
        launch_product(dtype, num_rows, rank, is_turned=is_turned)
        compiled = launched.pop("_product")
        assert 0 < compiled.metadata.shared <= BLOCK_SHARED_BYTES[target]
        if (target, dtype) == (90, torch.bfloat16):
            assert "isAsync = true" in compiled.asm["ttgir"]
            assert overwritten(compiled.asm["ttgir"]) == set()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_the_update_of_every_format_compiles(launched: dict[str, CompiledKernel], parameters, moments):
    """Triton's interpreter, in which its numbers are compared, takes Python that the compiler does not."""

    def moment() -> torch.Tensor | Codes:
        if moments is torch.uint8:
            return Codes(torch.zeros(512, dtype=moments), torch.zeros(2), torch.linspace(0, 1, 256))
        return torch.zeros(512, dtype=moments)

    adamw_triton(
        [torch.zeros(512, dtype=parameters)], [torch.zeros(512, dtype=parameters)], [moment()], [moment()],
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, num_updates=1, seed=1,
    )  # fmt: skip
    assert "_adamw" in launched


@pytest.mark.parametrize("key", [None, 7])
def test_what_a_publish_of_changes_launches_compiles(launched: dict[str, CompiledKernel], key: int | None) -> None:
    base, b, a = torch.zeros(1, 64, 128, dtype=torch.bfloat16), torch.zeros(1, 64, 8), torch.zeros(1, 8, 128)
    operands = MergeOperands(base, b, a, 1.0, 0, 64, key=key)
    marks = torch.zeros(1, 64, 128, dtype=torch.uint8)
    merge_kernel.merger(operands, torch.empty_like(base))()
    merge_kernel.merger(operands, torch.empty_like(base), operands, marks)()
    change_kernels.pack(change_kernels.launches_of([[16] * 5], [1], "cpu"), torch.zeros(1, dtype=torch.int32), TILE)
    launches = change_kernels.launches_of([[16] * 4], [1], "cpu")
    change_kernels.check(launches, TILE)
    change_kernels.apply(launches, TILE)
    assert launched.keys() == {"_merge", "_pack", "_check", "_apply"}
