"""A microbatch of made-up tokens, as full as a run's can get, that a rank tries before there is a batch.

Owns its size and its contents. Does not own the trying (`TrainerRank.warm_up`). Uses numpy and no torch, so that the
controller's process can call it.
"""

from collections.abc import Sequence

import numpy as np

from slipstream.conf.architecture.moe_spec import MoeSpec
from slipstream.trainer.types import Sample


def full_microbatch(max_tokens: int, longest: int, num_samples: int) -> list[int]:
    """Lengths of its sequences: as many of the longest as fit into `max_tokens`, but no more than there are samples.

    A sample beyond `max_tokens` gets a microbatch of its own, which is then the fullest.

    Args:
        max_tokens: trainer.max_microbatch_tokens times trainer.cp_size.
        longest: tokens of the longest possible sample.

    Example: full_microbatch(4096, 1500, 64) gives [1500, 1500].
    """
    return [longest] * max(1, min(num_samples, max_tokens // longest))


def made_up_samples(
    lengths: Sequence[int], vocab_size: int, version: int, replayed: MoeSpec | None = None
) -> list[Sample]:
    """One sample per length, the same on every call; all tokens but a sample's first count in the loss.

    Args:
        replayed: Of the model, for routes that give each expert equally many tokens; None: samples have none.
    """
    draw = np.random.default_rng(0)
    return [
        Sample(
            token_ids=draw.integers(0, vocab_size, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            rollout_logprobs=np.zeros(length, np.float32),
            advantages=(np.arange(length) > 0).astype(np.float32),
            oldest_version=version,
            routed_experts=None if replayed is None else _spread(length, replayed),
            has_route=None if replayed is None else np.ones(length, dtype=bool),
        )
        for length in lengths
    ]


def _spread(length: int, moe: MoeSpec) -> np.ndarray:
    """Experts in turn: token t of each layer gets the K after those of token t - 1."""
    experts_TK = np.arange(length * moe.top_k).reshape(length, 1, moe.top_k) % moe.num_experts
    return np.repeat(experts_TK.astype(np.int16), sum(moe.layers), axis=1)
