"""Promises of bench/scaling.py: how a profile is read, and that a layout with other gradients is found."""

import pytest

from bench.scaling import do_agree
from bench.training.step_profile import read_profile


def test_time_counts_once_and_exchanges_alone_where_nothing_else_runs():
    found = read_profile(
        [
            ("_product", True, 0.0, 4e6),
            ("ncclDevKernel_SendRecv", True, 3e6, 7e6),
            ("_product", True, 9e6, 10e6),
            ("cudaStreamSynchronize", False, 1e5, 6e5),
            ("cudaStreamSynchronize", False, 0.0, 1.0),
            ("cudaLaunchKernel", False, 0.0, 9e6),
        ],
        wall_s=11.0,
    )
    assert (found["exchange_alone_s"], found["idle_s"]) == (3.0, 3.0)
    assert found["kinds_s"] == {"grouped GEMM": 5.0, "exchange": 4.0}
    assert found["host_waits"] == {"cudaStreamSynchronize": {"count": 1, "total_s": 0.5}}


@pytest.mark.parametrize(("loss", "norm", "agrees"), [(2.0001, 1.0, True), (2.1, 1.0, False), (2.0, 0.9, False)])
def test_a_layout_of_another_loss_or_gradient_is_found(loss: float, norm: float, agrees: bool):
    rows = {
        "1x1": {"workloads": {"long": {"tokens": 64, "first_loss": 2.0, "first_norm": 1.0}}},
        "2x2": {"workloads": {"long": {"tokens": 64, "first_loss": loss, "first_norm": norm}}},
        "4x4": {"failed": "exit codes [1]", "workloads": {}},
    }
    assert do_agree(rows, ["long"]) is agrees
