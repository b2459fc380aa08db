"""Models that answer elsewhere; section `algorithm.teacher`: the one that distillation learns from."""

from dataclasses import dataclass
from typing import ClassVar

from slipstream.conf.schema.rules import above, require, without_password


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedModel:
    """A model behind an OpenAI endpoint."""

    base_url: str = ""
    """Where it answers, such as http://127.0.0.1:8000/v1; `/completions` or `/chat/completions` is added."""
    model: str = ""
    """Its name there."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key, such as OPENAI_API_KEY. The key is never written into the
    run folder. null: none is sent."""
    max_tries: ClassVar[int] = 6
    """Requests for one answer: after 429, 5xx, a lost connection or a timeout it is asked again, after the time that it
    names, or 0.5 s and twice as long each time."""
    try_timeout_s: ClassVar[float] = 60.0
    """Longest time of one request."""

    def check_address(self, section: str) -> None:
        """Refuse a base_url that is no address of HTTP, or that has a password."""
        without_password(f"{section}.base_url", self.base_url)
        require(
            self.base_url.startswith(("http://", "https://")),
            f"{section}.base_url must be the address of an OpenAI endpoint, such as http://127.0.0.1:8000/v1, got "
            f"{self.base_url!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig(AskedModel):
    """A server that gives log-probabilities of given tokens, such as `vllm serve`. Its tokenizer is the policy's."""

    max_concurrent: ClassVar[int] = 64
    """Responses that it is asked about at the same time; more wait here instead of there."""
    timeout_s: float = 120.0
    """If it takes longer for one response, all tries together, the response is left out of training and counted."""

    def __post_init__(self) -> None:
        if self.base_url:
            self.check_address("algorithm.teacher")
        above(0, "algorithm.teacher", self, "timeout_s")
