"""Locks: a run whose engine disagrees with its trainer says so and ends, before it trains on it for long."""

import json
import os
from pathlib import Path

import pytest
from system.conftest import ONE_OF_EACH, RUN_TIMEOUT_S, train

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)

FLAT_ENGINE = Path(__file__).parents[1] / "fakes" / "flat_engine"


def test_a_mismatch_is_measured_named_and_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tokens of ten come from a flat distribution. What is learnt with and without a correction from such an
    engine is in docs/parity.md (bench/runs.py flat_engine_none flat_engine_tis): a minute and a half a run.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FLAT_ENGINE), os.environ["PYTHONPATH"]]))
    words = ["run.num_steps=9", "parity.stop_k3=0.2"]
    run = train([*ONE_OF_EACH, "run.loggers=[]", *words], tmp_path)
    assert run.exit_code == 1, run.stderr
    row = run.rows[-1]
    assert row["step"] == 1, "the first step is beyond the threshold, and is trained on, published and saved"
    assert row["parity/k3"] > 0.2 and row["parity/k3_max"] > row["parity/k3_p99"] > row["parity/k3"]
    # Prefill knows nothing of the sampler's fault, so the floor is as large; it is the mean of 16 tokens.
    assert 0.1 < row["parity/k3_over_floor"] < 10
    assert row["parity/k3_from_0"] == pytest.approx(row["parity/k3"]) and row["parity/k3_from_16"] is None
    assert 0 < row["correction/ess_fraction"] < 1 and row["correction/truncated_fraction"] > 0
    reason = " ".join(run.stderr.split())
    for part in ("above parity.stop_k3=0.2", "in how the engine samples", "is saved in", "docs/parity.md"):
        assert part in reason
    saved = json.loads((run.folder / "checkpoints" / "step-000001" / "manifest.json").read_text())
    assert saved
