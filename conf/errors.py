"""Errors of the configuration layer.

    SlipstreamError            every error that Slipstream raises on purpose
      ConfigError(ValueError)  an option, or a combination of options, that cannot run

Each class is built from one message string, so that it unpickles on the other side of a Ray call. Over connections
without pickle an error is sent as its class name and its text, and named_error finds the class.
"""

from typing import TypeVar


class SlipstreamError(Exception):
    """Base of every error that Slipstream raises on purpose; its message is written for the user."""


class ConfigError(SlipstreamError, ValueError):
    """An option has a value that cannot run. The message names the option, the value, what is allowed and the cure."""


E = TypeVar("E", bound=SlipstreamError)


def named_error(name: str, base: type[E]) -> type[E] | None:
    """The class of this name: `base` or a subclass of it. None if this process knows none."""
    if base.__name__ == name:
        return base
    return next((found for below in base.__subclasses__() if (found := named_error(name, below))), None)
