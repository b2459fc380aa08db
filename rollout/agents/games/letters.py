"""A game to start from: rollout.agent=slipstream.rollout.agents.games.letters:play, or copy it into a file of your own.

    user: 4b7=    assistant: b    user: d01=    assistant: x    user: d01=    assistant: d      2 of 3 were right: 0.67

Every line hides one of eight letters among digits. A right answer brings the next line, a wrong one the same line
again. Rows have the column `lines`, and `prompt`, which is the first of them. Whoever always answers the same letter
gets 1/8.
"""

from slipstream.conf.json_files import JsonObject
from slipstream.rollout.agents.session import Session


async def play(task: JsonObject, session: Session) -> float:
    """The share of right answers; there are as many turns as lines."""
    lines = list(task["lines"])
    num_turns, num_right = len(lines), 0
    messages = [{"role": "user", "content": lines[0]}]
    for _ in range(num_turns):
        reply = await session.chat(messages)
        if reply.text.strip() in [character for character in lines[0] if character.isalpha()]:
            num_right += 1
            lines.pop(0)
        if lines:
            messages += [reply.message, {"role": "user", "content": lines[0]}]
    return num_right / num_turns
