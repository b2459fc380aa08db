"""Ranks that share the tokens of sequences (trainer.cp_size) train as one rank does."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.eager_pass import EagerGraphs
from cases.rank_helpers import (
    MOE_CONFIG,
    VOCAB,
    are_equal,
    count,
    fill_adapters,
    join_ranks,
    local_gradients,
    make_rank,
    save_state,
    spawn,
    trained,
    values_of,
)
from cases.tiny_configs import DEEPSEEK, DENSE, GEMMA3, MISTRAL

from slipstream.conf.schema import AlgorithmConfig, Normalization, TrainMode
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.model import build_decoder, context
from slipstream.trainer.parallel import ParallelLayout
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.step.microbatches import pack
from slipstream.trainer.types import Sample

LENGTHS = (1, 2, 3, 33, 5, 17, 8)
"""Also shorter than the chunks are many."""
ALGORITHM = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01, normalization=Normalization.sequence)
MODELS: dict[str, dict[str, Any]] = {
    "moe": MOE_CONFIG, "dense": DENSE, "latent": DEEPSEEK, "window": MISTRAL, "two windows": GEMMA3,
}  # fmt: skip
WORLDS = {
    2: [
        ("moe", 2, 2, ""), ("moe", 1, 2, "full"), ("dense", 1, 2, ""), ("latent", 1, 2, ""), ("window", 1, 2, ""),
        ("two windows", 1, 2, "full"), ("moe", 1, 2, "shifted"), ("moe", 1, 2, "dropped"),
        ("moe", 2, 2, "by layer"), ("dense", 1, 2, "full by layer"),
        ("moe", 2, 1, ""), ("moe", 1, 1, "full"), ("moe", 2, 1, "replayed"), ("dense", 1, 1, "full replayed"),
        ("moe", 2, 1, "replayed until one rank fails"),
    ],
    4: [("moe", 4, 4, ""), ("latent", 4, 2, ""), ("moe", 2, 4, "mixed"), ("moe", 2, 2, "mixed")],
}  # fmt: skip
"""Ranks -> model, ep_size, cp_size, and: full training, a fault, experts over some of the ranks, dense weights that
are gathered layer by layer, as where they are large, or microbatches that are padded and replayed as by CUDA graphs."""


def samples_of(lengths: tuple[int, ...] = LENGTHS) -> list[Sample]:
    """All tokens behind the first two count; experts are recorded for all but the last token, other than the router's
    own."""
    found = []
    for index, length in enumerate(lengths):
        draw = np.random.default_rng(index)
        mask = np.arange(length) >= 2
        found.append(
            Sample(
                token_ids=draw.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, draw.normal(-3.5, 0.3, length), 0).astype(np.float32),
                advantages=np.where(mask, draw.normal(size=length), 0).astype(np.float32),
                oldest_version=0,
            )
        )
    return found


def with_routes(samples: list[Sample]) -> list[Sample]:
    """With experts recorded for all tokens but the last of each."""
    experts = [
        (np.arange(one.num_tokens)[:, None, None] + np.arange(2)[None, :, None] + np.arange(2)).astype(np.uint8) % 4
        for one in samples
    ]
    has_route = [np.arange(one.num_tokens) < one.num_tokens - 1 for one in samples]
    return [replace(s, routed_experts=e, has_route=h) for s, e, h in zip(samples, experts, has_route, strict=True)]


def train_once(rank: TrainerRank, microbatches: list[list[int]], *, routes: bool) -> dict[str, Any]:
    """What a rank computes of these samples."""
    samples = with_routes(samples_of()) if routes else samples_of()
    batch = [[samples[i] for i in members] for members in microbatches]
    scores = rank.score(batch, 0)
    stats = rank.forward_backward(batch, count(samples))
    by_sample = [
        (i, one.logprobs, one.ref_logprobs)
        for members, of_microbatch in zip(microbatches, scores, strict=True)
        for i, one in zip(members, of_microbatch, strict=True)
    ]
    return {"sums": stats.sums, "maxima": stats.maxima, "gradients": local_gradients(rank), "scores": by_sample}


def plant(fault: str) -> None:
    """Break this process."""
    if fault == "shifted":
        cut_of = context.ContextCut.of

        def shifted(starts: Sequence[int], layout: ParallelLayout) -> context.ContextCut:
            cut = cut_of(starts, layout)
            return replace(cut, rows_R=cut.rows_R.roll(1))

        context.ContextCut.of = shifted
    if fault == "dropped":
        context._sum_of_ranks = lambda received, num_ranks: received.view(num_ranks, -1, received.shape[1])[0]


def load(kind: str, model: str, *place: Any, **sizes: int) -> TrainerRank:
    """A rank whose policy is not its reference: adapters that are not zero, or weights that have moved."""
    mode, share = TrainMode.full if "full" in kind else TrainMode.lora, build_decoder.WHOLE_SHARE
    build_decoder.WHOLE_SHARE = 0 if "by layer" in kind else share
    made = make_rank(*place, mode=mode, algorithm=ALGORITHM, hf_config=MODELS[model], **sizes)
    build_decoder.WHOLE_SHARE = share
    assert (made.decoder.whole is None) == ("by layer" in kind or made.decoder.layout.world_size == 1)
    if kind != "mixed":
        fill_adapters(made, made.decoder.layout.world_size)
    if "full" in kind:
        for values in made.learner.shards.values():
            values.mul_(1.05)
    return made


def work(
    rank: int, world_size: int, rendezvous: str, folder: Path, model: str, ep_size: int, cp_size: int, kind: str
) -> dict[str, Any]:
    """One process of one layout."""
    made = load(kind, model, rank, world_size, rendezvous, ep_size=ep_size, cp_size=cp_size)
    originals = context.ContextCut.of, context._sum_of_ranks
    plant(kind)
    graphs = None
    if "replayed" in kind:
        graphs = EagerGraphs(made.decoder, 8192, lambda failed: made._control.sum(failed) > 0)
        graphs.fails = rank == 1 and "fails" in kind
        made.policy = replace(made.policy, graphs=graphs)
    made.warm_up([3, 4])  # of which nothing below may show
    plan = pack(LENGTHS, world_size, 16, cp_size=cp_size)
    found = train_once(made, [*plan[rank], []], routes=model == "moe")
    found["step"] = made.optimizer_step()
    found["replays"] = None if graphs is None else graphs.num_replays
    context.ContextCut.of, context._sum_of_ranks = originals
    found |= refusals(made, rank, folder, [[samples_of()[i] for i in members] for members in plan[rank]])
    made.shutdown()
    return found


def refusals(made: TrainerRank, rank: int, folder: Path, batch: list[list[Sample]]) -> dict[str, Any]:
    """What becomes of an update whose gradient is no number on one rank, of a state that all go back to, and of a call
    in which one rank brings a microbatch less than the others."""
    before, counts = values_of(made), count(samples_of(), 1)
    made.forward_backward(batch, counts)
    if rank == 1:
        next(p for _, p in trained(made) if p.grad is not None).grad.mul_(float("nan"))
    refused = made.optimizer_step()
    found: dict[str, Any] = {"refused": (refused.is_finite, refused.policy_version, are_equal(before, values_of(made)))}
    save_state(made, folder / "state")
    made.forward_backward(batch, counts)
    made.optimizer_step()
    moved = not are_equal(before, values_of(made))
    made.states.load_state(folder / "state")
    found["went back"] = moved and made.policy_version == 1 and are_equal(before, values_of(made))
    try:
        made.forward_backward(batch[min(rank, 1) :], counts)
    except TrainerError as error:
        found["disagreement"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[tuple[Any, ...], list[dict[str, Any]]]]:
    """Number of ranks -> case -> what each rank found."""

    @functools.cache
    def run(size: int) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
        found = spawn(work, size, tmp_path_factory.mktemp("ranks"), WORLDS[size])
        return {(size, *case): parts for case, parts in zip(WORLDS[size], found, strict=True)}

    return run


def largest_error(parts: list[dict[str, Any]], want: dict[str, Any]) -> float:
    """Of a parameter's gradient, relative to its norm."""
    got = join_ranks([part["gradients"] for part in parts])
    assert got.keys() == want["gradients"].keys()
    errors = [
        float((got[name] - grad).norm() / grad.norm().clamp(min=1e-9)) for name, (_, grad) in want["gradients"].items()
    ]
    return max(errors)


def of_one_rank(model: str, kind: str) -> dict[str, Any]:
    """The same of all samples on one rank."""
    made = load(kind, model)
    return train_once(made, [list(range(len(LENGTHS)))], routes=model == "moe") | {"step": made.optimizer_step()}


CASES = [(size, *case) for size, cases in WORLDS.items() for case in cases]


@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_shared_sequences_train_like_whole_ones(ranks: Any, case: tuple[int, str, int, int, str]) -> None:
    size, model, _, cp_size, kind = case
    parts, want = ranks(size)[case], of_one_rank(model, kind)
    error = 0.0 if kind == "mixed" else largest_error(parts, want)
    if kind in ("shifted", "dropped"):
        assert error > 1e-2, "the planted fault shows"
        return
    assert error < 2e-5
    sums = {key: sum(part["sums"].get(key, 0.0) for part in parts) for key in want["sums"]}
    assert sums == pytest.approx(want["sums"], rel=1e-4, abs=1e-5), "every token is counted once"
    for key in ("parity/log_ratio_max", "parity/log_ratio_max_stale"):
        assert max(part["maxima"][key] for part in parts) == pytest.approx(want["maxima"][key], rel=1e-4)
    expected = {index: values for index, *values in want["scores"]}
    for rank, part in enumerate(parts):
        first = parts[rank - rank % cp_size]
        assert [index for index, *_ in part["scores"]] == [index for index, *_ in first["scores"]]
        for index, *values in part["scores"]:
            for value, right in zip(values, expected[index], strict=True):
                np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-5)
    num_replays = len(pack(LENGTHS, size, 16, cp_size=cp_size)[0]) + (model == "dense")  # the empty one has no routes
    expected_replays = None if "replayed" not in kind else 0 if "fails" in kind else num_replays
    assert [part["replays"] for part in parts] == [expected_replays] * size
    assert {index for part in parts for index, *_ in part["scores"]} == set(range(len(LENGTHS)))
    assert all(part["step"].is_finite for part in parts)
    assert all((part["refused"], part["went back"]) == ((False, 1, True), True) for part in parts)
    assert all("hold other microbatches" in part["disagreement"] for part in parts)
    norms = [part["step"].grad_norm for part in parts]
    assert norms == pytest.approx([want["step"].grad_norm] * size, rel=1e-5)
