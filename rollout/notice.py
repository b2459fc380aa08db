"""Whether a worker's machine has been told that it will be taken away: a file that appears, or a URL that answers 200.

Owns: how that is looked at. Does not own: what a worker does then (worker.py), nor what the run does
(fleet/scaling.py).
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx

from slipstream.rollout.worker_verbs import NOTICE

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
"""Clouds give 30 s to two minutes."""
_ANSWER_S = 2.0


async def tell_of_notice(where: str, tell: Callable[[str], None], *, every_s: float = LOOK_EVERY_S) -> None:
    """Look until there is a notice; then `tell(NOTICE)`. A machine's metadata service is on the machine's own link: no
    proxy can reach it."""
    said = ""
    verify = ssl.create_default_context()  # trusts whom the machine trusts
    with httpx.Client(trust_env=False, verify=verify, timeout=_ANSWER_S, follow_redirects=True) as client:
        while True:
            is_there, found = await asyncio.to_thread(_looked, where, client)
            if is_there:
                logger.warning("%s says that this machine will be taken away", where)
                tell(NOTICE)
                return
            if found and found != said:
                logger.warning("%s is not a notice, and no word that there is none: %s", where, found)
            said = found
            await asyncio.sleep(every_s)


def _looked(where: str, client: httpx.Client) -> tuple[bool, str]:
    """Whether there is a notice; and what else was found, for people, if it is not plain that there is none."""
    if where.startswith("/"):
        return Path(where).exists(), ""
    try:
        status = client.get(where).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return False, f"{type(error).__name__}: {error}"
    return status == httpx.codes.OK, "" if status in (httpx.codes.OK, httpx.codes.NOT_FOUND) else f"it answers {status}"
