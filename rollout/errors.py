"""Errors of the rollout side, all below RolloutError. Each is also a stdlib class, and is built from one message, so
that it unpickles on the other side of a Ray call. The user can repair a DataError, a RewardError and an AgentError."""

from slipstream.conf.errors import ConfigError, SlipstreamError, named_error
from slipstream.weight_sync.errors import ReplicaDirty


class RolloutError(SlipstreamError):
    """Something of prompts, engines, rewards or agents."""


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
