"""What the agents' service is told at its start. Plain values, for both ends of the connection."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    agent: str
    folder: str
    """Model folder: tokenizer and chat template."""
    stop_token_ids: list[int]
    tool_parser: str | None
    fixed: dict[str, float]
    """The run's values of request_fields.FIXED."""
    stop: list[str]
    """rollout.sampling.stop."""
    address: tuple[str, int]
    """Where the endpoint listens."""
    limits: dict[str, int]
    """Fields of episode.Limits."""
    timeout_s: float
    blocked_s: float
    num_processes: int
    environment: dict[str, str]
    """Variables of the agents' processes."""
    log_path: str | None
