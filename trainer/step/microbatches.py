"""Samples -> microbatches -> flat arrays: which rank trains which samples together, and how they are laid end to end.

Owns the assignment (`pack`) and the concatenation (`collate`). Does not own the batch itself
(orchestrator/loop/buffer.py). Uses numpy and no torch, so that the controller can call it.

    lengths   5 3 3 2 1    --pack(num_ranks=2, max_tokens=8)-->   rank 0: [[0, 3]]      rank 1: [[1, 2, 4]]
                                                                          5+2                   3+3+1

A caller may give `pack` the length of several samples that must stay together, in place of each one's. Before there is
a batch, ranks try a microbatch of made-up tokens, as full as a run's can get (`TrainerRank.warm_up`).

Invariants: every sample is in exactly one microbatch. No microbatch exceeds `max_tokens`, unless its only sample does.
All ranks run the same number of microbatches, because FSDP2 and expert parallelism make every layer a collective. Equal
input gives equal output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.conf.architecture.moe_spec import MoeSpec
from slipstream.trainer.types import Extent, Sample

ATTENTION_EQUAL_TOKENS = 16384
"""Length at which causal attention costs as much as everything else: 6.1 GFLOP per token in the matrices and 1.6
GFLOP per token in attention at 4096 tokens make it 15.6 k for Qwen3-30B-A3B. Only the balance depends on it."""


def sample_cost(num_tokens: int) -> float:
    """Relative time of one sample: its tokens, plus the attention term that grows with their square."""
    return num_tokens + num_tokens * num_tokens / ATTENTION_EQUAL_TOKENS


def pack(lengths: Sequence[int], num_ranks: int, max_tokens: int, *, cp_size: int = 1) -> list[list[list[int]]]:
    """Assign samples to microbatches and microbatches to ranks.

    First-fit-decreasing gives the number of microbatches, rounded up to a multiple of `num_ranks`; samples are then
    spread over that many by cost. Ranks wait for each other in every layer, so a step takes the sum over microbatch
    indices of the slowest rank's cost. To minimize that sum, microbatches of similar cost get the same index.

    Args:
        lengths: tokens of each sample, each >= 1.
        max_tokens: bound on a rank's tokens of one microbatch; a longer sample gets a microbatch of its own.
        cp_size: so many neighbouring ranks share the tokens of a microbatch; it divides num_ranks.

    Returns:
        Per rank, a list of microbatches; a microbatch is an ascending list of sample indices and may be empty.
    """
    if cp_size > 1:
        groups = pack(lengths, num_ranks // cp_size, max_tokens * cp_size)
        return [microbatches for microbatches in groups for _ in range(cp_size)]
    costs = [sample_cost(length) for length in lengths]
    fewest = _first_fit(lengths, max_tokens)
    num_bins = -(-len(fewest) // num_ranks) * num_ranks
    bins = _lightest_fit(lengths, costs, max_tokens, num_bins)
    if bins is None:  # spreading by cost found no place for a sample; first-fit did
        bins = fewest + [[] for _ in range(num_bins - len(fewest))]
    return _deal(bins, costs, num_ranks)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Bins by first-fit-decreasing: each sample goes into the first bin with room, or opens one."""
    bins: list[list[int]] = []
    tokens: list[int] = []
    for sample in _longest_first(lengths):
        length = lengths[sample]
        place = next((index for index, used in enumerate(tokens) if used + length <= max_tokens), None)
        if place is None:
            bins.append([sample])
            tokens.append(length)
        else:
            bins[place].append(sample)
            tokens[place] += length
    return bins


def _lightest_fit(
    lengths: Sequence[int], costs: Sequence[float], max_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Exactly `num_bins` bins; each sample goes into the cheapest one with room. None when one fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    loads = [0.0] * num_bins
    for sample in _longest_first(lengths):
        room = [i for i in range(num_bins) if tokens[i] == 0 or tokens[i] + lengths[sample] <= max_tokens]
        if not room:
            return None
        place = min(room, key=lambda index: (loads[index], index))
        bins[place].append(sample)
        tokens[place] += lengths[sample]
        loads[place] += costs[sample]
    return bins


def _deal(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> list[list[list[int]]]:
    """Take bins by falling cost, `num_ranks` at a time, and give each rank one: the least loaded gets the heaviest."""
    bin_costs = [sum(costs[sample] for sample in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda index: (-bin_costs[index], index))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for first in range(0, len(order), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: (loads[rank], rank))
        for rank, index in zip(lightest_first, order[first : first + num_ranks], strict=True):
            ranks[rank].append(sorted(bins[index]))
            loads[rank] += bin_costs[index]
    return ranks


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples laid end to end: T tokens of S sequences, with N predictions that count. Arrays of N are what LossTokens
    calls alike (`response_positions`: positions_N), float32 or int64; `targets` are these tokens.

    Example, two samples [7 8 9] and [4 5] whose last two and last one tokens count:
    token_ids 7 8 9 4 5, positions 0 1 2 0 1, cu_seqlens 0 3 5, predictor_rows 0 1 3, targets 8 9 5,
    sequence_lengths 2 2 1, sequence_index 0 0 1, response_positions 0 1 0.
    """

    token_ids: np.ndarray
    """[T] int64."""
    positions: np.ndarray
    """[T] int64; from 0 in every sequence."""
    cu_seqlens: np.ndarray
    """[S + 1] int32; sequence s is tokens cu_seqlens[s] to cu_seqlens[s + 1]."""
    predictor_rows: np.ndarray
    """[N] int64; the row whose hidden state predicts the n-th counted token: one before it."""
    targets: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    sequence_lengths: np.ndarray
    sequence_index: np.ndarray
    response_positions: np.ndarray
    """[N] int64; position of the n-th token behind the first counted one of its sequence."""
    staleness: np.ndarray
    routed_experts: np.ndarray | None = None
    """[T, layers with experts, experts per token]; None: no sample has any."""
    has_route: np.ndarray | None = None
    """[T] bool, given with routed_experts."""
    old_logprobs: np.ndarray | None = None
    """[N] float32; None: some sample has none."""
    ref_logprobs: np.ndarray | None = None
    """[N] float32; None: some sample has none."""
    extents: tuple[Extent, ...] = ()
    """The size of every rank's microbatch; empty: ranks did not tell each other."""

    @property
    def most_tokens(self) -> int | None:
        """T of the rank that has most; None: not known."""
        return max((one.num_tokens for one in self.extents), default=None)


_ZERO = np.zeros(1, np.float32)
UNCOUNTED = Sample(np.zeros(1, np.int32), np.zeros(1, np.bool_), _ZERO, _ZERO, oldest_version=0)


def extent_of(samples: Sequence[Sample]) -> Extent:
    lengths = [sample.num_tokens for sample in samples] or [1]
    has_routes = any(sample.routed_experts is not None for sample in samples)
    return Extent(sum(lengths), len(lengths), max(lengths), has_routes)


def collate(samples: Sequence[Sample], policy_version: int, extents: tuple[Extent, ...] = ()) -> Microbatch:
    """Lay samples end to end and shift targets: entry t of a sample's arrays is about predicting token t from
    row t - 1.

    Args:
        samples: members of one microbatch. Without samples, the microbatch is a single token 0 that does not count, so
            that every collective of a step still runs.
        policy_version: the version about to be trained.

    Raises:
        ValueError: arrays of unequal length, a first token that counts (nothing precedes it), or a sample from
            the future.
    """
    for index, sample in enumerate(samples):
        _check_sample(index, sample, policy_version)
    samples = samples or [UNCOUNTED]
    cu_seqlens = np.cumsum([0] + [sample.num_tokens for sample in samples])
    counted = [np.flatnonzero(sample.loss_mask) for sample in samples]
    num_counted = np.array([len(rows) for rows in counted], np.int64)

    def gather(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([array[rows] for array, rows in zip(arrays, counted, strict=True)]).astype(dtype)

    return Microbatch(
        token_ids=np.concatenate([sample.token_ids for sample in samples]).astype(np.int64),
        positions=np.concatenate([np.arange(sample.num_tokens) for sample in samples]).astype(np.int64),
        cu_seqlens=cu_seqlens.astype(np.int32),
        predictor_rows=np.concatenate([start + rows - 1 for start, rows in zip(cu_seqlens, counted, strict=False)]),
        targets=gather([sample.token_ids for sample in samples], np.int64),
        rollout_logprobs=gather([sample.rollout_logprobs for sample in samples], np.float32),
        advantages=gather([sample.advantages for sample in samples], np.float32),
        sequence_lengths=np.repeat(num_counted, num_counted),
        sequence_index=np.repeat(np.arange(len(samples)), num_counted),
        response_positions=np.concatenate([rows - rows[:1] for rows in counted]).astype(np.int64),
        staleness=np.repeat(np.array([policy_version - sample.oldest_version for sample in samples]), num_counted),
        old_logprobs=_gather_known([sample.old_logprobs for sample in samples], counted),
        ref_logprobs=_gather_known([sample.ref_logprobs for sample in samples], counted),
        extents=extents,
        **_routes(samples),
    )


def _gather_known(arrays: Sequence[np.ndarray | None], counted: Sequence[np.ndarray]) -> np.ndarray | None:
    """Entries of the tokens that count; None if a sample has no such array."""
    known = [array for array in arrays if array is not None]
    if len(known) != len(arrays):
        return None
    return np.concatenate([array[rows] for array, rows in zip(known, counted, strict=True)]).astype(np.float32)


def _routes(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Routes of all samples, none where a sample has none; empty when no sample has any."""
    known = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if not known:
        return {}
    parts = [(sample.num_tokens, sample.routed_experts, sample.has_route) for sample in samples]
    none = known[0][:1]
    return {
        "routed_experts": np.concatenate([np.repeat(none, n, axis=0) if e is None else e for n, e, _ in parts]),
        "has_route": np.concatenate([np.zeros(n, dtype=bool) if has is None else has for n, _, has in parts]),
    }


def _check_sample(index: int, sample: Sample, policy_version: int) -> None:
    sizes = {
        "token_ids": len(sample.token_ids),
        "loss_mask": len(sample.loss_mask),
        "rollout_logprobs": len(sample.rollout_logprobs),
        "advantages": len(sample.advantages),
    }
    if sample.routed_experts is not None:
        sizes["routed_experts"] = len(sample.routed_experts)
        sizes["has_route"] = 0 if sample.has_route is None else len(sample.has_route)
    if len(set(sizes.values())) != 1 or sample.num_tokens == 0:
        raise ValueError(f"sample {index} needs arrays of one length >= 1, got {sizes}")
    if sample.loss_mask[0]:
        raise ValueError(f"sample {index} counts its first token in the loss, but nothing precedes it to predict it")
    if sample.oldest_version > policy_version:
        raise ValueError(
            f"sample {index} was sampled by policy version {sample.oldest_version}, "
            f"but the trainer is only at {policy_version}"
        )


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
