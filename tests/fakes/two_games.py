"""Agents for rows of both games that can be learned from nothing; and the rows."""

import json
from pathlib import Path
from typing import Any

from slipstream.rollout.agents.games import letters, lookup
from slipstream.rollout.agents.session import Session

SHIPPED = Path(__file__).parents[2] / "conf" / "data"


async def play(task: dict[str, Any], session: Session) -> float:
    """The row's game."""
    return await (lookup.follow if "table" in task else letters.play)(task, session)


def letter_rows(name: str) -> list[dict[str, Any]]:
    """Those of the game that ships: train or heldout."""
    return [json.loads(line) for line in (SHIPPED / f"letter_game_{name}.jsonl").read_text().splitlines()]


def lookup_rows(name: str) -> list[dict[str, Any]]:
    """The same lines as prompt and results of a tool, where each holds another letter."""
    rows: list[dict[str, Any]] = []
    for row in letter_rows(name):
        first, second, third = row["lines"]
        keys = [next(character for character in line if character.isalpha()) for line in row["lines"]]
        if len(set(keys)) == 3:
            rows.append({"prompt": first, "table": {keys[0]: second, keys[1]: third}, "answer": keys[2]})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
