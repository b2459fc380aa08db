"""What all launches in this package share: which tensors kernels run on, sizes of grids and blocks, and the precision
of products.

What is called x_torch defines the result of x, with the gradients of autograd, and runs on devices other than CUDA;
x_triton is the same by a kernel. Configurations (tile sizes, warps, stages) are fixed in the code, by shape, rank and
kind of GPU. Autotuning would run at different times on ranks with different row counts, and collectives would time out.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def is_for_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in FLOATS and x.numel() > 0


def by_device(
    definition: Callable[Concatenate[Tensor, P], R], kernel: Callable[Concatenate[Tensor, P], R]
) -> Callable[Concatenate[Tensor, P], R]:
    """What a definition in torch computes, by the kernel where the first argument is on a GPU."""

    @functools.wraps(definition)
    def run(first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        return (kernel if first.is_cuda else definition)(first, *args, **kwargs)

    return run


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows and columns of a thread block's tile, its warps, and how many loads ahead its loop runs."""

    rows: int
    columns: int
    warps: int
    stages: int


def programs(kernel: Any, grid: tuple[Any, ...]) -> Any:
    """A kernel that runs once for each point of the grid. Untyped: Triton's types lack options such as num_warps."""
    return kernel[grid]


def cdiv(size: int, part: int) -> int:
    """How many parts cover the size. triton.cdiv takes the host 5 us, because kernels can call it, too."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is no less than a positive size; see cdiv."""
    return 1 << (size - 1).bit_length()


def padded_rank(rank: int) -> int:
    """The power of two, at least 16, that a tensor-core product over the rank needs; the rest is masked."""
    return max(16, next_power_of_2(rank))


def tiling_of(tilings: Mapping[int, Tiling], rank: int, element_size: int) -> Tiling:
    """The tiling of a kernel whose shared memory and registers grow with the rank.

    Args:
        tilings: By the largest number of bytes of a padded row of low-rank elements, ascending.
        rank: At most conf.schema.MAX_EXPERT_RANK.
        element_size: Bytes per element of the compute dtype.
    """
    row_bytes = padded_rank(rank) * element_size
    return next(tiling for most_bytes, tiling in tilings.items() if row_bytes <= most_bytes)


def precision_of(x: Tensor) -> str:
    """The input precision for tl.dot. float32 operands multiply as float32: TF32 would keep 11 bits of them."""
    return "ieee" if x.dtype is torch.float32 else "tf32"


def factor_of(stack: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
    """One expert's factor for a torch definition, in memory of its own. The bits of a BLAS product may depend on its
    operands' alignment, which a parameter gathered by FSDP2 lacks."""
    return stack[expert].to(dtype).clone(memory_format=torch.contiguous_format)
