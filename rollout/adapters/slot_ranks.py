"""Asks all ranks of an engine about its adapter slots while it samples, over a socket to a thread of each.

vLLM's own collective_rpc runs between two steps of the engine: each call waits for one step and delays the next, and a
publish into an adapter slot makes three calls. These need not wait, because no request reads the slot that is written.

Owns: that all ranks are asked at once, and the deadline of a call. Does not own the sockets (weight_sync/calls), nor
what is asked (receivers.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from slipstream.rollout.crash_reports import death_of_a_child
from slipstream.rollout.errors import EngineDied
from slipstream.rollout.worker_verbs import EngineConnection
from slipstream.weight_sync.calls.verbs import verb_of

P = ParamSpec("P")
T = TypeVar("T")


class SlotRanks:
    """All ranks of one engine. Belongs to one event loop.

    Args:
        addresses: Of each rank's thread.
    """

    def __init__(self, addresses: Sequence[str], key: bytes) -> None:
        self._connections = [EngineConnection(address, key) for address in addresses]

    async def ask(
        self, limit_s: float, verb: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Ask every rank. Results by rank.

        Args:
            limit_s: Longest that all ranks together may take.
            verb: A method of SlotReceivers; its arguments follow.

        Raises:
            SlipstreamError: The first rank's error, as its own class.
            EngineDied: The engine's process is gone, or a rank did not answer in time.
        """
        asked = verb_of(verb)
        calls = [connection.call(asked, *args, **kwargs) for connection in self._connections]
        try:
            async with asyncio.timeout(limit_s):
                results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError as e:
            raise EngineDied(f"the engine did not answer {asked.name} within {limit_s:g} s") from e
        for result in results:
            if isinstance(result, EngineDied):
                how = death_of_a_child() or "died"
                raise EngineDied(f"the engine's process {how}; this rollout worker must be restarted") from result
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for connection in self._connections:
            connection.close()
