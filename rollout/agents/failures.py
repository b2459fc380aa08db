"""The ways in which an episode of an agent can fail, one word each. Each word is a metric: rollout/failed_<word>."""

from slipstream.rollout.user_processes.outcomes import BLOCKED, DIED, NOT_A_NUMBER, RAISED, TIMEOUT

TURNS, TOKENS, ENGINE = "turns", "tokens", "engine"

FAILURES: dict[str, str] = {
    RAISED: "episodes whose agent raised",
    NOT_A_NUMBER: "episodes whose agent returned something else than a finite number or None",
    TIMEOUT: "episodes that took longer than rollout.episodes.timeout_s",
    TURNS: "episodes whose agent raised after rollout.episodes.max_turns was reached",
    TOKENS: "the same after rollout.episodes.max_tokens or rollout.max_model_len",
    ENGINE: "episodes whose engines failed a request for good",
    DIED: "episodes whose agent process ended",
    BLOCKED: "episodes whose agent process did not answer for 30 s",
}
