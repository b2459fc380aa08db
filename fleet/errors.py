"""Errors of the fleet, all below FleetError. Each is also a stdlib class, and is built from one message so that it
unpickles anywhere."""

from slipstream.conf.errors import SlipstreamError


class FleetError(SlipstreamError):
    """Base of what can go wrong with the workers of a run that has started."""


class WaitTimeout(FleetError, TimeoutError):
    """Something awaited did not come within its deadline. The message says what, how long, and who is late."""


class NoReplicasLeft(FleetError, RuntimeError):
    """Every rollout worker is out of service."""


class FleetRefusal(FleetError, ValueError):
    """Workers cannot come or go as was asked. Nothing was done."""
