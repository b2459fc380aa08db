"""What a response's length adds to its reward; lengths are in response tokens."""

from slipstream.conf.schema import RewardConfig


def overlong_punishment(num_tokens: int, *, max_tokens: int, overlong_tokens: int) -> float:
    """Soft overlong punishment: 0 up to a length, then falling evenly to -1 at the longest response.

    With L = num_tokens, L_max = max_tokens and L_cache = overlong_tokens > 0:

        0                                   if L <= L_max - L_cache
        ((L_max - L_cache) - L) / L_cache   if L_max - L_cache < L <= L_max
        -1                                  if L_max < L

    Source: DAPO, Yu et al., https://arxiv.org/abs/2503.14476, equation 13.
    """
    allowed = max_tokens - overlong_tokens
    return max(-1.0, min(0.0, (allowed - num_tokens) / overlong_tokens))


def shape(config: RewardConfig, num_tokens: int, max_tokens: int) -> dict[str, float]:
    """What the length adds to the sum of the rewards, weights included, by the option that asks for it."""
    added: dict[str, float] = {}
    if config.overlong_tokens:
        punishment = overlong_punishment(num_tokens, max_tokens=max_tokens, overlong_tokens=config.overlong_tokens)
        added["overlong_penalty"] = config.overlong_penalty * punishment
    if config.length_penalty:
        added["length_penalty"] = config.length_penalty * (-num_tokens / max_tokens)
    return added
