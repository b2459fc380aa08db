"""Stands in for the engine behind an agents' endpoint: it says what a test wrote down."""

from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.agents.episode import Sampled


class Script:
    """Samples the next text of a list; remembers what it was given after the parent's tokens."""

    def __init__(self, chat: FolderChatText) -> None:
        self.chat = chat
        self.texts: list[str] = []
        self.given: list[tuple[int | None, str]] = []

    async def generate(self, parent: int | None, token_ids: list[int], max_tokens: int) -> Sampled:
        self.given.append((parent, self.chat.decode(token_ids)))
        tokens = self.chat.encode(self.texts.pop(0))[:max_tokens]
        reason = "stop" if tokens[-1] == 2 else "length"
        return Sampled(len(self.given) - 1, tokens, [-0.5] * len(tokens), reason)
