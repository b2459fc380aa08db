"""Locks: the share and the losses of a run's GPU-seconds add up to one, and each loss has its cause."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from slipstream.orchestrator.metrics import goodput
from slipstream.orchestrator.metrics.goodput import goodput_of

SECONDS = st.one_of(st.none(), st.floats(0, 1e4))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "step/total_s": st.floats(1e-3, 1e4),
            "step/gpus": st.floats(0.5, 64),
            "trainer/num_tokens": st.one_of(st.none(), st.integers(0, 10**7)),
            "optim/skipped": st.sampled_from([None, 0, 1]),
            "trainer/restarts": st.sampled_from([0, 0, 1]),
            "rollout/restarts": st.sampled_from([0, 0, 1]),
            "rollout/replicas_serving": st.integers(0, 3),
            "rollout/replicas_wanted": st.integers(0, 3),
            **dict.fromkeys(
                ("step/between_s", "step/redone_s", "trainer/down_s", "rollout/wait_s", "sync/total_s", "eval/wait_s"),
                SECONDS,
            ),
        }
    ),
    max_size=12,
)


def step(number: int, **changed: float | None) -> dict[str, Any]:
    """A quiet step: 2000 tokens in 2 s on 4 GPUs, so 250 tokens per second and GPU."""
    row = {
        "step/gpus": 4.0,
        "step/total_s": 2.0,
        "step/between_s": 0.0,
        "trainer/num_tokens": 2000,
        "rollout/wait_s": 0.5,
    }
    return row | {"step": number, "sync/total_s": 0.1} | {name.replace("__", "/"): v for name, v in changed.items()}


def quiet(num: int) -> list[dict[str, Any]]:
    return [step(number) for number in range(1, num + 1)]


@given(ROWS, st.lists(st.floats(0, 1e4), max_size=3))
def test_shares_add_up_to_one_and_none_is_negative(rows: list[dict[str, Any]], starts: list[float]) -> None:
    numbered = [row | {"step": number + 1} for number, row in enumerate(rows)]
    found = goodput_of([*numbered, *quiet(3)], starts)
    if found is None:  # most quiet steps trained on nothing
        return
    assert 0 <= found.share <= 1
    assert all(0 < share <= 1 + 1e-9 for share in found.lost.values())
    assert found.share + sum(found.lost.values()) == pytest.approx(1)
    assert found.gpu_s >= sum(row["step/total_s"] * row["step/gpus"] for row in rows)


def test_a_quiet_run_lost_nothing() -> None:
    found = goodput_of(quiet(10))
    assert found is not None
    assert (found.share, found.lost, found.quiet_tokens_per_gpu_s, found.gpu_s) == (1.0, {}, 250.0, 80.0)


@pytest.mark.parametrize(
    ("row", "cause", "lost_s"),
    [
        (step(11, step__total_s=8.0, trainer__down_s=6.0, trainer__restarts=1), goodput.RANKS, 6),
        (step(11, step__total_s=5.0, rollout__wait_s=3.5, rollout__restarts=1), goodput.ENGINES, 3),
        (step(11, step__total_s=5.0, rollout__wait_s=3.5, rollout__replicas_wanted=2), goodput.ENGINES, 3),
        (step(11, step__total_s=5.0, rollout__wait_s=3.5), goodput.WAITING, 3),
        (step(11, step__total_s=5.0, sync__total_s=3.1), goodput.PUBLISH, 3),
        (step(11, step__total_s=5.0, eval__wait_s=3.0), goodput.EVALUATION, 3),
        (step(11, step__between_s=3.0), goodput.BETWEEN, 3),
        (step(11, step__between_s=None, step__redone_s=30.0), goodput.RESUME, 30),
        (step(11, optim__skipped=1), goodput.REFUSED, 2),
        (step(11, step__total_s=5.0), goodput.SLOWER, 3),
    ],
)
def test_a_loss_has_its_cause(row: dict[str, Any], cause: str, lost_s: float) -> None:
    columns = [{name: one[name] for name in goodput.COLUMNS & one.keys()} for one in (*quiet(10), row)]
    found = goodput_of(columns)
    assert found is not None
    in_all_s = 20 + row["step/total_s"] + (row["step/between_s"] or 0) + (row.get("step/redone_s") or 0)
    assert found.lost == {cause: pytest.approx(lost_s / in_all_s)}
    assert found.share == pytest.approx((in_all_s - lost_s) / in_all_s)


def test_starts_count_the_first_one_apart() -> None:
    found = goodput_of(quiet(10), [60.0, 10.0, 10.0])
    assert found is not None
    assert found.lost == {goodput.START: pytest.approx(0.6), goodput.RESUME: pytest.approx(0.2)}


def test_causes_that_explain_more_than_was_lost_are_scaled_down() -> None:
    """A step of 4 s that trained twice the tokens was not slow, though it waited 2 s longer."""
    rows = [*quiet(10), step(11, step__total_s=4.0, trainer__num_tokens=3000, rollout__wait_s=2.5)]
    found = goodput_of(rows)
    assert found is not None
    assert found.lost == {goodput.WAITING: pytest.approx(1 / 24)}


@pytest.mark.parametrize("rows", [[], quiet(2), [row | {"step/gpus": None} for row in quiet(5)]])
def test_without_quiet_steps_there_is_none(rows: list[dict[str, Any]]) -> None:
    assert goodput_of(rows, [10.0]) is None
