"""A trainer that counts, as the loop sees one, and what its ranks and its publishes report."""

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from fakes.world import Watched, World
from slipstream.conf.schema import RolloutConfig
from slipstream.trainer.step.mismatch_bins import NUM_K3_BINS, POSITION_STARTS
from slipstream.trainer.types import Denominators, LossStats, OptimStats, Sample, Scores
from slipstream.weight_sync.errors import PlanMismatch
from slipstream.weight_sync.publish.report import PublishReport, ReplicaReport

SUMS = (
    "loss/total_sum",
    "loss/policy_sum",
    "policy/num_tokens",
    "policy/entropy_sum",
    "policy/ratio_sum",
    "policy/num_clipped_low",
    "policy/num_clipped_high",
    "policy/num_sequences",
    "correction/weight_sum",
    "correction/weight_square_sum",
    "correction/num_truncated",
    "correction/num_masked",
    "correction/num_truncated_sequences",
    "correction/num_masked_sequences",
    "kl/ref_k3_sum",
    *(f"parity/{name}{suffix}" for name in ("k3_sum", "prob_diff_sum", "num_tokens") for suffix in ("", "_stale")),
)
MAXIMA = tuple(f"parity/{name}_max{suffix}" for name in ("k3", "prob_diff", "log_ratio") for suffix in ("", "_stale"))
VECTORS = {
    "parity/k3_histogram": NUM_K3_BINS,
    "parity/k3_histogram_stale": NUM_K3_BINS,
    "parity/k3_by_position": len(POSITION_STARTS),
    "parity/num_tokens_by_position": len(POSITION_STARTS),
}
"""What a rank measures, and the length of each vector."""
T = TypeVar("T")


def measured(sums: Mapping[str, float] = MappingProxyType({}), **maxima: float) -> LossStats:
    """What a rank returns that measured these, and zeros for the others."""
    return LossStats(
        dict.fromkeys(SUMS, 0.0) | dict(sums),
        dict.fromkeys(MAXIMA, 0.0) | maxima,
        {name: [0.0] * length for name, length in VECTORS.items()},
    )


def stats(num_tokens: float, k3: float, num_stale: float = 0.0) -> LossStats:
    """What parity says of sequences of two tokens with an entropy of 1.5; stale ones have ten times this k3."""
    sums = {
        "policy/num_tokens": num_tokens,
        "policy/num_sequences": num_tokens / 2,
        "policy/entropy_sum": 1.5 * num_tokens,
        "parity/num_tokens": num_tokens - num_stale,
        "parity/num_tokens_stale": num_stale,
        "parity/k3_sum": k3 * (num_tokens - num_stale),
        "parity/k3_sum_stale": 10 * k3 * num_stale,
    }
    return measured(sums)


def outcome(committed: bool, error: str | None = None) -> ReplicaReport:
    """One replica's part of a publish."""
    return ReplicaReport("tcp://replica", committed, error)


def publish_report(version: int, replicas: Sequence[ReplicaReport], num_changed: int | None = 5) -> PublishReport:
    """A publish that took 60 ms and wrote 1000 bytes."""
    return PublishReport(
        version=version, epoch=1, replicas=tuple(replicas), pause_s=0.01, begin_s=0.01, idle_s=0.01, mark_s=0.0,
        prepare_s=0.01, write_s=0.01, verify_s=0.01, commit_s=0.01, total_s=0.06, num_bytes=1000, peak_bytes=100,
        watermark_bytes=1 << 20, num_changed_params=num_changed,
    )  # fmt: skip


class FakeTrainer(Watched):
    """Raises the version by one a step, unless the step is listed as not finite."""

    def __init__(self, world: World, num_workers: int, *, num_ranks: int = 2) -> None:
        super().__init__()
        self.world = world
        self.num_ranks = num_ranks
        self.num_steps = 0
        self._is_changed = False
        self.not_finite: set[int] = set()
        self.failing_replicas: dict[int, set[int]] = {}
        """version -> replicas that do not commit it."""
        self.trained: list[tuple[int, list[Sample]]] = []
        self.traced: dict[int, Path] = {}
        self.excluded: list[tuple[int, list[int]]] = []
        """Per publish: its version, and the replicas it was told to leave out."""
        self.num_changed_params: int | None = 5
        self.refuses_reconnect: set[int] = set()
        self.log_ratio = 0.125
        """Its log-probabilities minus those of the engines."""
        self.being_written: list[tuple[Path, int]] = []
        """Files of a checkpoint, and what each is to hold."""
        self.is_slow_to_write = False
        self.extra_sums: dict[str, float] = {}
        """Sums of every step's loss, over those of a trainer that agrees with its engines."""
        self.down_s: list[float] = []
        self.unkept_steps: int | None = None
        self.grad_norm, self.lr = 1.0, 1e-3
        world.committed = [-1] * num_workers

    async def forward_backward(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        assert len(microbatches_by_rank) == self.num_ranks
        assert len({len(microbatches) for microbatches in microbatches_by_rank}) == 1
        samples = [s for rank in microbatches_by_rank for microbatch in rank for s in microbatch]
        assert denominators.num_sequences == len(samples)
        assert denominators.num_possible_tokens == RolloutConfig().sampling.max_tokens * len(samples)
        self.trained.append((denominators.policy_version, samples))
        self.world.diary.append(("train", denominators.policy_version))
        await asyncio.sleep(0)
        tokens = float(denominators.num_valid_tokens)
        sums = {"policy/num_tokens": tokens, "policy/entropy_sum": 2.0 * tokens}
        shown = [sample for sample in samples if sample.is_shown]
        logprobs = {sample.origin: sample.rollout_logprobs[sample.loss_mask] + self.log_ratio for sample in shown}
        return [measured(sums | self.extra_sums), replace(measured(), logprobs=logprobs)]

    async def score(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], policy_version: int
    ) -> list[list[list[Scores]]]:
        assert policy_version == self.world.version
        self.world.diary.append(("score", policy_version))

        def of(sample: Sample) -> Scores:
            ones = np.ones(sample.num_valid_tokens, np.float32)
            return Scores(-2 * ones, -3 * ones, ones)

        return [[[of(s) for s in microbatch] for microbatch in rank] for rank in microbatches_by_rank]

    async def optimizer_step(self, *, ends_version: bool = True) -> OptimStats:
        await self._reached("optimizer_step")
        is_finite = self.num_steps not in self.not_finite
        self.num_steps += 1
        self._is_changed = self._is_changed or is_finite
        if ends_version:
            self.world.version += int(self._is_changed)
            self._is_changed = False
        return OptimStats(self.world.version, self.grad_norm if is_finite else math.nan, self.lr, is_finite)

    async def publish(self, timeout_s: float, exclude: Sequence[int] = (), trace: Path | None = None) -> PublishReport:
        await self._reached("publish")
        version = self.world.version
        if trace is not None:
            self.traced[version] = trace
        self.world.diary.append(("publish", version))
        self.excluded.append((version, list(exclude)))
        await asyncio.sleep(0)
        failing = self.failing_replicas.get(version, set()) | set(exclude)
        outcomes = []
        for index in range(len(self.world.committed)):
            if index not in failing:
                self.world.committed[index] = version
            error = "IntegrityError: lm_head.weight" if index in failing else None
            outcomes.append(outcome(index not in failing, error))
        return publish_report(version, outcomes, self.num_changed_params)

    async def reconnect(self, replica: int, endpoint: str, timeout_s: float, base_endpoint: str = "") -> None:
        self.world.diary.append(("reconnect", replica, endpoint))
        if replica in self.refuses_reconnect:
            raise PlanMismatch("another layout")

    async def evaluate(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        tokens = float(denominators.num_valid_tokens)
        return [LossStats({"sft/nll_sum": tokens, "policy/num_tokens": tokens}, {})]

    async def begin_checkpoint(self, folder: Path, adapter: Path | None) -> None:
        self.being_written = [(folder / "rank0.json", self.world.version)]
        if adapter is not None:
            self.being_written += [(adapter / "adapter_model.safetensors", self.world.version)]
        await self._reached("end of begin_checkpoint")

    async def meanwhile(self, work: Awaitable[T]) -> T:
        return await work

    async def has_written(self) -> bool:
        await self._reached("has_written")
        if self.is_slow_to_write:
            return False
        for path, version in self.being_written:
            await asyncio.to_thread(path.parent.mkdir, exist_ok=True)
            path.write_text(str(version))
        return True

    async def export(self, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir)
        (folder / "adapter_model.safetensors").write_text(str(self.world.version))

    async def load_state(self, folder: Path) -> None:
        self.world.version = int((folder / "rank0.json").read_text())
