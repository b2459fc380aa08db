"""Errors of every class: as ours, as values, undone, and out of a thread."""

import asyncio
import threading
from unittest.mock import Mock

import pytest

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.failures import in_daemon_thread, outcome_of, outcome_when_done, raised_as, undone_by


def test_an_error_of_any_class_is_raised_as_ours_and_keeps_its_words_and_cause() -> None:
    told = pytest.raises(ConfigError, match=r"^reading failed: KeyError: 'x'; look there$")
    with told as caught, raised_as(ConfigError, "reading failed: ", "; look there"):
        raise KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_that_kind_passes_as_it_is() -> None:
    told = ConfigError("this option")
    with pytest.raises(ConfigError) as caught, raised_as(ConfigError, "reading failed: "):
        raise told
    assert caught.value is told


@pytest.mark.parametrize("signal", [KeyboardInterrupt, asyncio.CancelledError])
def test_what_tells_a_process_to_end_is_no_error(signal: type[BaseException]) -> None:
    def told() -> None:
        raise signal

    async def told_soon() -> None:
        told()

    with pytest.raises(signal), raised_as(SlipstreamError, "failed: "):
        told()
    with pytest.raises(signal):
        outcome_of(told)
    coroutine = outcome_when_done(told_soon())
    with pytest.raises(signal):
        coroutine.send(None)


def test_a_block_that_ends_early_is_undone_and_one_that_ends_is_not() -> None:
    undone: list[BaseException] = []
    with undone_by(undone.append):
        pass
    assert undone == []
    cancelled = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError), undone_by(undone.append):
        raise cancelled
    assert undone == [cancelled]


def test_an_outcome_is_the_result_or_the_error() -> None:
    async def divided(by: int) -> int:
        return 4 // by

    assert outcome_of(divmod, 9, 4) == (2, 1)
    assert isinstance(outcome_of(divmod, 9, 0), ZeroDivisionError)
    assert asyncio.run(outcome_when_done(divided(2))) == 2
    assert isinstance(asyncio.run(outcome_when_done(divided(0))), ZeroDivisionError)


def test_a_daemon_thread_hands_over_its_result_and_even_what_ends_a_process() -> None:
    assert in_daemon_thread(threading.current_thread, name="rows").result().name == "rows"
    assert in_daemon_thread(threading.current_thread).result().daemon
    assert in_daemon_thread(divmod, 9, 4).result() == (2, 1)
    with pytest.raises(SystemExit):
        in_daemon_thread(Mock(side_effect=SystemExit(3))).result()
