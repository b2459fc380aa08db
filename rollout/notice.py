"""Whether a worker's machine has been told that it will be taken away: a file that appears, or a URL that answers 200.

Owns: how that is looked at. Does not own: what a worker does then (worker.py), nor what the run
does (fleet/scaling.py).
"""

import asyncio
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from slipstream.rollout.worker_verbs import NOTICE

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
"""Clouds give 30 s to two minutes."""
_ANSWER_S = 2.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A machine's metadata service is on the machine's own link: no proxy can reach it."""


async def tell_of_notice(where: str, tell: Callable[[str], None], *, every_s: float = LOOK_EVERY_S) -> None:
    """Look until there is a notice; then `tell(NOTICE)`."""
    said = ""
    while True:
        is_there, found = await asyncio.to_thread(looked, where)
        if is_there:
            logger.warning("%s says that this machine will be taken away", where)
            tell(NOTICE)
            return
        if found and found != said:
            logger.warning("%s is not a notice, and no word that there is none: %s", where, found)
        said = found
        await asyncio.sleep(every_s)


def looked(where: str) -> tuple[bool, str]:
    """Whether there is a notice; and what else was found, for people, if it is not plain that there is none."""
    if where.startswith("/"):
        return Path(where).exists(), ""
    try:
        with _OPENER.open(where, timeout=_ANSWER_S) as answer:
            return answer.status == 200, "" if answer.status == 200 else f"it answers {answer.status}"
    except urllib.error.HTTPError as error:
        return False, "" if error.code == 404 else f"it answers {error.code}"
    except (OSError, ValueError) as error:
        return False, f"{type(error).__name__}: {error}"
