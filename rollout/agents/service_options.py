"""What the agents' service is told at its start, for both ends of the connection."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.conf.schema import EpisodesConfig, SamplingConfig
from slipstream.rollout.agents.episode import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    agent: str
    folder: Path
    """Model folder: tokenizer and chat template."""
    stop_token_ids: list[int]
    sampling: SamplingConfig
    """rollout.sampling."""
    episodes: EpisodesConfig
    limits: Limits
    blocked_s: float
    environment: dict[str, str]
    """Variables of the agents' processes."""
    log_path: Path | None
