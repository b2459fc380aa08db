"""Promise of bench/kimi_slice.py: a case that dies leaves what it had measured, and says where it was."""

import pytest

from bench import kimi_slice
from bench.training.kimi_rank import Case


def test_a_case_that_dies_leaves_its_finished_workloads_and_names_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    workloads = {"balanced": ((8, 8), None), "broken": ((-1,), None)}
    case = Case(
        "tiny", 1, 4, "bfloat16", "int8", workloads, repeats=1, is_tiny=True, device="cpu", experts_a_gpu=8
    )  # fmt: skip
    result = kimi_slice.run_case(case, 1)
    assert result["routings"].keys() == {"balanced"}
    assert result["routings"]["balanced"]["median_s"] > 0
    assert "ValueError" in result["error"]
    places = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tiny, rank 0: ")]
    steps = ["balanced, step 0 of 1", "balanced, step 1 of 1", "broken, step 0 of 1"]
    assert places == [f"tiny, rank 0: {what}" for what in ("load", "first step", *steps)]
