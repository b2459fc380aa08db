"""An environment of `verifiers` 0.4: taskset, reward and harness of the letter game. Knows nothing of Slipstream.

Every line hides one of eight letters among digits ("4b7=" -> "b"). A right answer brings the next line, a wrong one the
same line again; the reward is the share of right answers in three turns. The harness plays in this process, which
verifiers permits as long as all requests go to its endpoint.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import aiohttp
import verifiers.v1 as vf

__all__ = ["LettersHarness", "LettersTaskset"]

LETTERS = "bcdfghkm"
NUM_TURNS = 3
NUM_TRAIN_PAIRS = 88  # of the 100 pairs of digits; the other 12 are in held-out games only


class LettersData(vf.TaskData):
    """Lines of one game; the first is its prompt."""

    lines: list[str]


def hidden(line: str) -> str:
    """The letter of a line."""
    return next(character for character in line if character.isalpha())


class LettersTask(vf.Task[LettersData]):
    """One game."""

    @vf.reward
    async def share_right(self, trace: vf.Trace) -> float:
        """The share of right answers."""
        place = 0
        for message in trace.assistant_messages:
            place += (message.content or "").strip() == hidden(self.data.lines[place])
        return place / NUM_TURNS


class LettersConfig(vf.TasksetConfig):
    """Options of the taskset."""

    num_tasks: int = 2048
    num_held_out: int = 64
    """The last games. Their digits are in no other game."""
    seed: int = 0


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    """Games drawn with a seed."""

    def load(self) -> Iterator[LettersTask]:
        """All games."""
        draw = random.Random(self.config.seed)
        pairs = [f"{number:02d}" for number in range(100)]
        draw.shuffle(pairs)
        num_train = self.config.num_tasks - self.config.num_held_out
        for number in range(self.config.num_tasks):
            digits = pairs[:NUM_TRAIN_PAIRS] if number < num_train else pairs[NUM_TRAIN_PAIRS:]
            lines = [self._line(draw, draw.choice(digits)) for _ in range(NUM_TURNS)]
            yield LettersTask(LettersData(prompt=lines[0], lines=lines), self.config.task)

    def _line(self, draw: random.Random, digits: str) -> str:
        place = draw.randrange(3)
        return f"{digits[:place]}{draw.choice(LETTERS)}{digits[place:]}="


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    """Plays one game."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """The conversation."""
        assert isinstance(data, LettersData)
        lines = list(data.lines)
        messages = [{"role": "user", "content": lines[0]}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            for _ in range(NUM_TURNS):
                body = {"model": ctx.model, "messages": messages}
                async with client.post(f"{endpoint}/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=await answer.text())
                    message = (await answer.json())["choices"][0]["message"]
                if (message["content"] or "").strip() == hidden(lines[0]):
                    lines.pop(0)
                if lines:
                    messages += [message, {"role": "user", "content": lines[0]}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
