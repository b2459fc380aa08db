"""trainer.model.recompute: the gradients of a part are those without it, and what is inside is not kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.model.recompute import Recomputed


class Part(nn.Module):
    """Two inputs; a number, an index and nothing among the outputs; a frozen weight and two trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)
        self.inner: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor, y: Tensor, factors: tuple[Tensor, float]) -> tuple[Any, ...]:
        wide = self.first(x) * factors[0]
        self.inner.append(weakref.ref(wide))
        out = self.second(wide.sin())
        return out, out.argmax(-1), None, (out * y).sum(-1) * factors[1]


def gradients(part: Part, run: Any, *, does_x: bool, used: tuple[int, ...]) -> list[Tensor | None]:
    torch.manual_seed(1)
    x, y = torch.randn(3, 5, requires_grad=does_x), torch.randn(3, 5, requires_grad=True)
    part.zero_grad()
    outs = run(x, y, (torch.randn(7), 3.0))
    assert not outs[1].requires_grad
    assert outs[2] is None
    torch.stack([(outs[index] ** 2).sum() for index in used]).sum().backward()
    return [x.grad, y.grad, *(parameter.grad for parameter in part.parameters())]


@pytest.mark.parametrize("does_x", [True, False])
@pytest.mark.parametrize("used", [(0, 3), (0,), (3,)])
def test_gradients_are_those_of_the_part_itself(does_x: bool, used: tuple[int, ...]) -> None:
    part = Part()
    wanted = gradients(part, part, does_x=does_x, used=used)
    mine = gradients(part, Recomputed(part, [part]), does_x=does_x, used=used)
    assert len(part.inner) == 3  # twice, and once without
    for one, other in zip(mine, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert wanted[2] is not None


def test_what_is_inside_lives_no_longer_than_the_call() -> None:
    part = Part()
    out, *_ = Recomputed(part, [part])(torch.randn(3, 5), torch.randn(3, 5), (torch.randn(7), 3.0))
    assert out.requires_grad
    assert part.inner[0]() is None
    kept, *_ = part(torch.randn(3, 5), torch.randn(3, 5), (torch.randn(7), 3.0))
    assert kept.requires_grad
    assert part.inner[1]() is not None
