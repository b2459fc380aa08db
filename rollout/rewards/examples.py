"""Rewards to start from: `reward.kind=slipstream.rollout.rewards.examples:share_of_answer`, or copy one into a file of
your own and name that: `reward.kind=FILE.py:share_of_answer`.

A reward is a function (prompt text, response text, fields) -> float. Fields are the row's other columns,
and `finish_reason`: "stop", or "length" for a response that was cut off. It runs in a process of its own: an exception
or a hang costs one sample, not the job.
"""

from slipstream.conf.json_files import JsonObject


def share_of_answer(prompt: str, response: str, fields: JsonObject) -> float:
    """Share of the response's characters that equal the one-character answer.

    It gives partial credit, so that a random policy gets rewards to learn from. Example: answer "e", response "ee3e"
    -> 0.75. An empty response scores 0.
    """
    characters = response.replace(" ", "")
    return characters.count(str(fields["answer"])) / len(characters) if characters else 0.0
