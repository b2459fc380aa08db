"""Errors of the weight sync. Each is also a stdlib class, and is built from one message, so that it unpickles anywhere.

    SlipstreamError
      WeightSyncError
        RecordError(ValueError)            a loader did something that cannot be replayed as plain copies
        PlanError(ValueError)              the two sides' layouts cannot be joined, or a plan does not cover them
        TransportError(ConnectionError)    bytes did not cross, or may not have crossed
          TransferTimeout(TimeoutError)    a deadline passed; late writes may still land
          TransferFailed                   the link refused or broke
          LinkMismatch                     the link in use is not the link that was asked for
        ProtocolError(RuntimeError)        a message that the version state machine does not allow
          StaleEpoch                       a message of a transaction that is over
          PlanMismatch                     the two ends hold different plans
        IntegrityError(RuntimeError)       bytes arrived, and they are not the bytes that were sent
        ReplicaDirty(RuntimeError)         a half-written replica was asked to serve
        ReplicaError(RuntimeError)         a replica answered with an error of its own
        RankLost(RuntimeError)             a trainer rank left a publish: it died, or stopped for too long
        WatermarkError(MemoryError)        a publish would hold more temporary memory than declared

An error names the tensor or parameter, the rank, the version, what was expected and what came.
"""

from slipstream.conf.errors import SlipstreamError


class WeightSyncError(SlipstreamError):
    """Base of every error of the weight sync."""


class RecordError(WeightSyncError, ValueError):
    """A loader did something other than copying rectangles. Names the tensor, the parameter and the op."""


class PlanError(WeightSyncError, ValueError):
    """The sources cannot fill a destination, or a plan does not do what loads say. Names the tensor and parameter."""


class TransportError(WeightSyncError, ConnectionError):
    """Bytes did not cross, or may not have crossed. The destination is dirty until it is written again in full."""


class TransferTimeout(TransportError, TimeoutError):
    """A transfer passed its deadline. It is not over: late writes may land until the session is reset."""


class TransferFailed(TransportError):
    """The link refused a transfer, or broke during one."""


class LinkMismatch(TransportError):
    """The link in use is not the one that was asked for."""


class ProtocolError(WeightSyncError, RuntimeError):
    """A control message that the version state machine does not allow in its present state."""


class StaleEpoch(ProtocolError):
    """A control message of a transaction that is over."""


class PlanMismatch(ProtocolError):
    """The two ends hold different plans."""


class IntegrityError(WeightSyncError, RuntimeError):
    """Received bytes differ from the sent ones, or did not change and the source did. Names the first parameters."""


class ReplicaDirty(WeightSyncError, RuntimeError):
    """A replica whose weights are half written was asked to serve."""


class ReplicaError(WeightSyncError, RuntimeError):
    """A replica answered with an error; the message starts with the class name it had there."""


class RankLost(WeightSyncError, RuntimeError):
    """A trainer rank did not come to a collective of a publish. Replicas that had begun stay DIRTY."""


class WatermarkError(WeightSyncError, MemoryError):
    """A publish's temporary memory would exceed, or exceeded, the declared watermark."""
