"""Promise of bench/kimi_slice.py: a case that dies leaves what it had measured, and says where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

DIES = """
import json, sys
from bench import kimi_slice
from bench.training.kimi_rank import Case

case = Case(
    "tiny", 1, 4, "bfloat16", "int8", {"balanced": ((8, 8), None), "broken": ((-1,), None)},
    repeats=1, is_tiny=True, device="cpu", experts_a_gpu=8,
)
result = kimi_slice.run_case(case, 1)
open(sys.argv[1], "w").write(json.dumps(result))
"""


def test_a_case_that_dies_leaves_its_finished_workloads_and_names_its_place(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-c", DIES, str(out)], cwd=root, capture_output=True, text=True, timeout=600, check=True
    )
    result = json.loads(out.read_text())
    assert result["routings"].keys() == {"balanced"}
    assert result["routings"]["balanced"]["median_s"] > 0
    assert "ValueError" in result["error"]
    places = [line for line in ran.stderr.splitlines() if line.startswith("tiny, rank 0: ")]
    steps = ["balanced, step 0 of 1", "balanced, step 1 of 1", "broken, step 0 of 1"]
    assert places == [f"tiny, rank 0: {what}" for what in ("load", "first step", *steps)]
