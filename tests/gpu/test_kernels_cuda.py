"""Promise of trainer/kernels on CUDA: every kernel computes its torch definition."""

import pytest
import torch
from cases.kernel_cases import CASES

from slipstream.trainer.kernels.experts.gather import gather_project
from slipstream.trainer.kernels.experts.groups import RowGroups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_its_torch_definition(name: str) -> None:
    CASES[name]("cuda")


@pytest.mark.parametrize("rank", [32, 64, 128, 256])
def test_every_row_of_many_is_projected_from_its_own_values(rank: int) -> None:
    """As many rows as a microbatch has: a kernel that reads a tile while it is replaced is wrong in a few of them."""
    num_experts, rows_each, depth = 32, 512, 2048
    generator = torch.Generator("cuda").manual_seed(rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    x, p_ERK = draw(2048, depth), draw(num_experts, rank, depth)
    source = torch.randint(0, len(x), (num_experts * rows_each,), device="cuda", generator=generator)
    groups = RowGroups(torch.full((num_experts,), rows_each, device="cuda"), len(source))
    wanted = (x[source].view(num_experts, rows_each, depth).float() @ p_ERK.float().transpose(1, 2)).view(-1, rank)
    for _ in range(10):
        low = gather_project(x, source, p_ERK, groups)[1].float()
        assert (low - wanted).abs().max() < 1.0 < wanted.abs().max() / 100
