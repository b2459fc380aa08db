"""Errors of the configuration layer.

    SlipstreamError            every error that Slipstream raises on purpose
      ConfigError(ValueError)  an option, or a combination of options, that cannot run

Each class is built from one message string, so that it unpickles on the other side of a Ray call.
"""


class SlipstreamError(Exception):
    """Base of every error that Slipstream raises on purpose; its message is written for the user."""


class ConfigError(SlipstreamError, ValueError):
    """An option has a value that cannot run. The message names the option, the value, what is allowed and the cure."""
