"""Errors cross process boundaries as pickles and mean the same on the other side."""

import inspect
import pickle

import pytest

from slipstream.conf import errors as conf_errors
from slipstream.conf.errors import SlipstreamError
from slipstream.fleet import errors as fleet_errors
from slipstream.orchestrator import errors

CLASSES = [
    value
    for module in (conf_errors, fleet_errors, errors)
    for value in vars(module).values()
    if inspect.isclass(value) and issubclass(value, SlipstreamError)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls: type[SlipstreamError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("what, got, expected, cure")))
    assert type(copy) is cls
    assert str(copy) == "what, got, expected, cure"
