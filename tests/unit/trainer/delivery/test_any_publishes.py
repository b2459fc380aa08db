"""Publishes in any order, with faults between them: see tests/cases/any_publishes.py. All kinds, and many publishes in
a row: tests/long/test_many_publishes.py."""

import pytest
from cases.any_publishes import machine_of
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test


@pytest.mark.parametrize("kind", ["changes, all weights", "changes, tied", "factors, tied"])
def test_whatever_happens_between_publishes_who_serves_one_holds_its_bytes(kind: str) -> None:
    few = settings(max_examples=2, stateful_step_count=6, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine_of(kind), settings=few)
