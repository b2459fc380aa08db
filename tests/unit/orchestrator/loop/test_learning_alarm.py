"""Steps that teach nothing are told: after a few in a row, again after a while, and at the end of a run."""

import logging
import re
from pathlib import Path

import pytest
from fakes.loop import Loop, make_config

from slipstream.conf.schema import AlgorithmConfig, TeacherConfig
from slipstream.orchestrator.files.metrics_catalogue import Value
from slipstream.orchestrator.loop.alarms import LearningAlarm

TAUGHT: dict[str, Value] = {
    "optim/skipped": 0,
    "optim/grad_norm": 0.5,
    "reward/no_spread_fraction": 0.5,
    "reward/mean": 0.25,
}
EQUAL = TAUGHT | {"reward/no_spread_fraction": 1.0}


def warned(alarm: LearningAlarm, rows: list[dict[str, Value]], caplog: pytest.LogCaptureFixture) -> list[int]:
    """Steps, from 0, after which a warning was logged."""
    found = []
    for step, row in enumerate(rows):
        caplog.clear()
        alarm.look(step, row)
        found += [step] * len(caplog.records)
    return found


def test_a_warning_comes_after_a_few_steps_and_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    start: dict[str, Value] = {"optim/skipped": None}
    rows = [start, *[EQUAL] * 4, TAUGHT, *[EQUAL] * 25]
    assert warned(LearningAlarm(AlgorithmConfig()), rows, caplog) == [10, 30], "after five, and after twenty more"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"reward/no_spread_fraction": 1.0}, r"rewards of each group are all equal \(reward/mean 0.25\)"),
        ({"optim/grad_norm": 0.0}, "the gradient is 0"),
        ({"optim/skipped": 1, "optim/grad_norm": None}, "changed no weight"),
    ],
)
def test_the_end_of_a_short_run_says_why_nothing_was_learned(
    change: dict[str, Value], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    alarm = LearningAlarm(AlgorithmConfig())
    warned(alarm, [{"optim/skipped": None}, *[TAUGHT | change] * 3], caplog)
    alarm.say_at_the_end()
    assert re.match(f"nothing was learned in the 3 steps of this start: .*{why}", caplog.messages[-1])
    one = LearningAlarm(AlgorithmConfig())
    warned(one, [TAUGHT | change], caplog)
    one.say_at_the_end()
    assert caplog.messages[-1].startswith("nothing was learned in the 1 step of this start: ")
    for num_taught, num_lost in ((4, 0), (3, 2), (1, 4)):
        alarm = LearningAlarm(AlgorithmConfig())
        warned(alarm, [TAUGHT] * num_taught + [TAUGHT | change] * num_lost, caplog)
        caplog.clear()
        alarm.say_at_the_end()
        assert not caplog.messages, "fewer than five at the end of a longer run"
    alarm.look(5, TAUGHT | change)
    alarm.say_at_the_end()
    assert caplog.messages[-1].startswith("nothing was learned in the 5 last steps of this start: ")


def test_equal_rewards_teach_where_advantages_compare_the_batch_or_a_teacher_speaks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    teacher = TeacherConfig(base_url="http://127.0.0.1:1/v1", model="big")
    for algorithm in (
        AlgorithmConfig(advantage="batch_std"),
        AlgorithmConfig(advantage="own.py:f"),
        AlgorithmConfig(distill_coef=0.5, teacher=teacher),
    ):
        assert not warned(LearningAlarm(algorithm), [EQUAL] * 5, caplog)


async def test_a_run_that_learned_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path, make_config())
    loop.trainer.grad_norm = 0.0
    with caplog.at_level(logging.WARNING):
        await loop.run()
    assert "nothing was learned in the 4 steps of this start: the gradient is 0 (optim/grad_norm)" in caplog.messages
