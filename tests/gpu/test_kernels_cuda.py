"""Promise of trainer/kernels on CUDA: every kernel computes its torch definition."""

from __future__ import annotations

import pytest
import torch
from cases.kernel_cases import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_its_torch_definition(name: str) -> None:
    CASES[name]("cuda")
