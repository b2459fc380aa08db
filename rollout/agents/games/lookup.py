"""A tool that can be learned from nothing: rollout.agent=slipstream.rollout.agents.games.lookup:follow.

    user: 4b7=    assistant: b    tool: d01=    assistant: d    tool: x88=    assistant: x    the answer: 1.0

What the model says is a call of the tool with that key; the tool's result holds the next key, and the last one holds
the answer. So nobody can answer without the tool, and every call needs the result of the one before. A key that the
table does not have gets the last result again. Rows have `prompt`, `table` (key -> result) and `answer`.

A tiny model that knows no format of tool calls can learn this; for one that does, see calculator.py.
"""

from slipstream.conf.json_files import JsonObject
from slipstream.rollout.agents.session import Session


async def follow(task: JsonObject, session: Session) -> float:
    """The share of calls and answer that were right; there are as many turns as it takes without a mistake."""
    table: dict[str, str] = task["table"]
    num_turns, num_right, shown = len(table) + 1, 0, task["prompt"]
    messages = [{"role": "user", "content": shown}]
    for _ in range(num_turns):
        reply = await session.chat(messages)
        said = reply.text.strip()
        if num_right == len(table):
            return (num_right + (said == task["answer"])) / num_turns
        if said in shown and said in table:
            num_right, shown = num_right + 1, table[said]
        messages += [reply.message, {"role": "tool", "content": shown}]
    return num_right / num_turns
