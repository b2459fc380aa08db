"""Errors of the orchestrator. Each is also a stdlib class, and is built from one message so that it unpickles anywhere.

    SlipstreamError
      ConfigError(ValueError)   of conf.errors: an option that cannot run
        PreflightError
      OrchestratorError
        CheckpointError(ValueError)    ObjectStoreError, DiskFull, DiskLost(OSError)
        CheckpointLost, PlacementError, ClusterLost, RunTakenOver, PushError, TrainingStopped(RuntimeError)

The command line shows the message alone of every SlipstreamError; where it was raised is in run.log. Those that the
user can repair (orchestrator.cli has the list) have an exit code of their own. Whatever else is raised is a defect of
ours or of a library, and is shown with its traceback.
"""

from slipstream.conf.errors import ConfigError, SlipstreamError


class PreflightError(ConfigError):
    """The run cannot start on this machine with these files; nothing was started. The message lists every problem, each
    with its cure."""


class OrchestratorError(SlipstreamError):
    """Base of the errors of a run that has started."""


class CheckpointError(OrchestratorError, ValueError):
    """A checkpoint is missing, damaged, or belongs to a run with other options."""


class CheckpointLost(OrchestratorError, RuntimeError):
    """A trainer rank died before its files of a checkpoint were there. The run goes on, if it can, without it."""


class ObjectStoreError(OrchestratorError, OSError):
    """A checkpoint cannot be written to an object store, or read from it. The message says where, why, and the cure."""


class DiskFull(OrchestratorError, OSError):
    """A file of the run could not be written: no space, or a quota. The message says which, how much is free, and what
    was saved."""


class DiskLost(OrchestratorError, OSError):
    """A file of the run cannot be reached any more, or only be read. The message says which, and why."""


class PlacementError(OrchestratorError, RuntimeError):
    """The Ray cluster cannot hold the run's processes. The message says what was asked for and what there is."""


class ClusterLost(OrchestratorError, RuntimeError):
    """A server of the run's own Ray cluster has ended. The message names it, and the signal that ended it."""


class RunTakenOver(OrchestratorError, RuntimeError):
    """Another process goes on with the run. This one ends, and writes nothing into its folder."""


class PushError(OrchestratorError, RuntimeError):
    """A rank of `slipstream push` failed, or an engine did not commit. The message names it and its reason."""


class TrainingStopped(OrchestratorError, RuntimeError):
    """The loop cannot go on: a trainer rank died, or too many steps were refused."""
