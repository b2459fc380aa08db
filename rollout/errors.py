"""Errors of the rollout side.

    SlipstreamError
      RolloutError
        DataError(ValueError)              a prompt file that cannot be read; names the file and the line
          RowTooLong                       a row with more tokens than an option allows
        TokenizerError(ValueError)         a file that is no tokenizer
        TemplateRefused(ValueError)        a chat template refuses messages; its own words
        RewardError(ConfigError)           a reward that cannot be imported or set up
        AgentError(ConfigError)            an agent that cannot be imported, or an endpoint that cannot listen
        EngineError(RuntimeError)          the engine refused to start, or a request failed inside it
          EngineDied(ConnectionError)      the engine's process is gone; the worker must be restarted
          UnsupportedWeights(ValueError)   the engine keeps a weight in a form that cannot be written in place
          SlotsBusy                        requests of older versions read every adapter slot
        ReplicaNotServing(ReplicaDirty)    asked to sample while the weights are not of one committed version

Each class is built from one message, so that it unpickles on the other side of a Ray call.
"""

from slipstream.conf.errors import ConfigError, SlipstreamError, named_error
from slipstream.weight_sync.errors import ReplicaDirty


class RolloutError(SlipstreamError):
    """Base of every error of the rollout side."""


class DataError(RolloutError, ValueError):
    """A prompt file is missing, malformed or does not fit the model. Names the file and the line."""


class RowTooLong(DataError):
    """A row has more tokens than an option allows; data.drop_too_long leaves such rows out."""


class TokenizerError(RolloutError, ValueError):
    """A file is no tokenizer."""


class TemplateRefused(RolloutError, ValueError):
    """A chat template refuses messages, or cannot be rendered. The message is its own."""


class RewardError(RolloutError, ConfigError):
    """The configured reward cannot run at all. (One sample's failure is counted instead, never raised.)"""


class AgentError(RolloutError, ConfigError):
    """The configured agent cannot run at all. (One episode's failure is counted instead, never raised.)"""


class EngineError(RolloutError, RuntimeError):
    """The engine refused to start, or failed a request."""


class EngineDied(EngineError, ConnectionError):
    """The engine's process is gone."""


class UnsupportedWeights(EngineError, ValueError):
    """The engine stores a parameter in a form that one-sided writes cannot fill. Names the parameter and the reason."""


class SlotsBusy(EngineError):
    """No adapter slot became free in time for a publish. Names the versions that are read."""


class ReplicaNotServing(RolloutError, ReplicaDirty):
    """A request came while the replica's weights were not of one committed version. Names the state."""


def error_class(name: str) -> type[Exception]:
    """The class of an error whose name another process sent; EngineError if the name is not one of Slipstream's."""
    return named_error(name, SlipstreamError) or EngineError
