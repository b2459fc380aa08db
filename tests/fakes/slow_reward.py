"""A reward that takes its time, as those that call a service do: the processes of a run wait for it."""

import time
from typing import Any

from slipstream.rollout.rewards import examples


def share_of_answer(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """A step of 32 samples takes at least 1 s longer."""
    time.sleep(0.032)
    return examples.share_of_answer(prompt, response, fields)
