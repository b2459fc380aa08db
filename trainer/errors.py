"""Errors of the trainer.

    SlipstreamError
      TrainerError
        CheckpointError(ValueError)   a checkpoint or adapter on disk does not fit the model
        LayoutError(RuntimeError)     ranks, meshes or shards do not fit together

Each class is built from one message string, so that it unpickles on the other side of a Ray call.
"""

from slipstream.conf.errors import SlipstreamError


class TrainerError(SlipstreamError):
    """Base of the trainer's errors."""


class CheckpointError(TrainerError, ValueError):
    """A file holds other tensors than the model needs. The message names the file and the tensor."""


class LayoutError(TrainerError, RuntimeError):
    """The process group, the meshes and the model disagree. The message names the rank."""
