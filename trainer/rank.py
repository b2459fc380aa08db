"""TrainerRank: one process of the trainer. Loads its part of the policy and trains it.

Owns the order of collectives inside one rank. Does not own forward passes (step/policy_forward.py), parameters and
their updates (step/learner.py), what is saved and continued from (rank_states.py), the way to engines (delivery.py),
the loop (orchestrator/loop/controller.py), Ray, or metrics: it returns what it measures.

    load -> ( ( forward_backward* -> optimizer_step )+ -> publish )*     states.* between steps; shutdown
                    |                    |
         gradients add up        drops them, also when it refuses the update

A step has one update, or several of one batch: `score` comes before them then, and the version rises with the last.

Invariant: all ranks make the same calls in the same order, with equally many microbatches: every layer is a
collective. Calls that take host-side arguments compare them over the control group first, so that a
disagreement is an error and not a hang.
"""

import logging
import math
import time
from dataclasses import astuple
from operator import sub
from typing import NoReturn

import torch

from slipstream.conf.architecture.families import read_config
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import RemoteMerge, TrainMode
from slipstream.trainer.adapter_io import load_adapter
from slipstream.trainer.delivery.delivery import Delivery
from slipstream.trainer.engine_ops.engine_forward import choose_forward
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.model.build_decoder import build_decoder, dense_trainable, expert_trainable, sharded_dense
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.graphs import DecoderGraphs, refusal_of_graphs
from slipstream.trainer.model.whole_weights import extra_bytes
from slipstream.trainer.parallel import ParallelLayout, take_device
from slipstream.trainer.process_group import ControlGroup
from slipstream.trainer.rank_states import RankStates
from slipstream.trainer.step.learner import Learner
from slipstream.trainer.step.loss import LOSSES, LossAccumulator
from slipstream.trainer.step.microbatches import collate, extent_of, made_up_samples
from slipstream.trainer.step.policy_forward import PolicyForward, ReferencePolicy
from slipstream.trainer.types import Denominators, Extent, LossStats, OptimStats, Sample, Scores, TrainerOptions
from slipstream.trainer.weights.factors import planned_merges
from slipstream.trainer.weights.loading import load_weights, open_reader
from slipstream.trainer.weights.quantization import BlockFp8

logger = logging.getLogger(__name__)

MADE_BY_LOAD = ("policy", "learner", "delivery", "states")


class TrainerRank:
    """One rank. Every public method is collective over the trainer's ranks."""

    policy: PolicyForward
    """Runs forward passes of this rank; after load(), as the others here."""
    learner: Learner
    """Holds and updates what this rank trains."""
    delivery: Delivery
    """This rank's way to the engines."""
    states: RankStates
    """Saves what this rank holds, and continues from it."""

    def __init__(self, options: TrainerOptions, *, rank: int = 0, host: str = "127.0.0.1") -> None:
        """Join the process group. `host`: address at which engines' links reach this rank; loopback when all of them
        are on this machine."""
        self._options, self._rank, self._host = options, rank, host
        self._device = take_device(options.device, rank)
        self._control = ControlGroup(rank, options.trainer.num_ranks, options.rendezvous, self._device)
        torch.manual_seed(options.seed)

    def __getattr__(self, name: str) -> NoReturn:
        """Is asked for what a rank has not, or has not yet."""
        if name in MADE_BY_LOAD:
            raise TrainerError(f"rank {self._rank}: call load() first")
        raise AttributeError(name)

    @property
    def policy_version(self) -> int:
        """Steps that changed the policy since the run began."""
        return self.learner.policy_version if "learner" in vars(self) else 0

    @property
    def decoder(self) -> Decoder:
        return self.policy.decoder

    # ------------------------------------------------------------------------------------------------------------ load

    def load(self) -> JsonObject:
        """Build the decoder, fill its weights, set up the optimizer. Returns facts for the log."""
        times, options, trainer = [time.perf_counter()], self._options, self._options.trainer
        spec = read_config(options.hf_config, trainer.numerics.places.mla_norm_eps)
        layout = ParallelLayout.create(trainer.num_ranks, trainer.ep_size, self._rank, self._device, trainer.cp_size)
        dtype = getattr(torch, options.model.dtype.value)
        by = choose_forward(spec, dtype, trainer, self._device, options.weight_sync.mode, options.engine_ranks)
        times.append(time.perf_counter())
        decoder = build_decoder(
            spec, dtype=dtype, device=self._device, trainer=trainer, layout=layout,
            rounding_seed=options.weight_sync.rounding_seed(options.seed), by=by, may_be_whole=True,
        )  # fmt: skip
        times.append(time.perf_counter())
        reader = open_reader(options.model, spec, seed=options.seed, device=self._device)
        report = load_weights(decoder, reader, seed=options.seed)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        times.append(time.perf_counter())
        init_from = trainer.lora.init_from if trainer.mode is TrainMode.lora else None
        num_unadapted = 0 if init_from is None else load_adapter(decoder, init_from)
        trainable = [*dense_trainable(decoder), *expert_trainable(decoder)]
        learner = Learner(trainable, trainer.optim, options.num_steps, options.algorithm.updates_per_step, layout)
        refusal = refusal_of_graphs(decoder, self._device)
        self.learner = learner
        self.policy = self._policy_of(decoder, learner, has_graphs=refusal is None)
        self.delivery = self._delivery_of(decoder)
        num_trainable = self._control.sum(sum(values.numel() for values in learner.shards.values()))
        self.states = RankStates(options, decoder, learner, self._control)
        times.append(time.perf_counter())
        parts = "kernels", "decoder", "weights", "what trains and publishes them"
        return {
            "rank": self._rank,
            "device": str(self._device),
            "backends": decoder.backends,
            "dense_weights": "layer by layer" if decoder.whole is None else "once a step",
            "whole_bytes": extra_bytes(sharded_dense(decoder), layout.world_size),
            "cuda_graphs": f"none ({refusal})" if refusal is not None else f"up to {trainer.cuda_graph_tokens} tokens",
            "num_parameters": sum(math.prod(meta.shape) for meta in spec.checkpoint_tensors(options.model.dtype.value)),
            "num_trainable_parameters": num_trainable,
            "loaded_tensors": report.num_tensors,
            "loaded_bytes": report.num_bytes,
            "packed_bytes": report.num_packed_bytes,
            "ignored_tensors": list(report.ignored),
            "unadapted_matrices": num_unadapted,
            "mtp_tensors": report.num_mtp_tensors,
            "state_bytes": self.states.num_bytes,
            "load_parts_s": dict(zip(parts, map(sub, times[1:], times), strict=False)),
        }

    def _policy_of(self, decoder: Decoder, learner: Learner, *, has_graphs: bool) -> PolicyForward:
        """Forward passes as the objective wants them. What training starts from is the reference: the base without
        adapters, or copies of what is trained."""
        options, trainer = self._options, self._options.trainer
        starts_from_base = trainer.mode is TrainMode.lora and trainer.lora.init_from is None
        reference = graphs = None
        if options.algorithm.needs_reference:
            copied = None if starts_from_base else list(learner.shards.values())
            reference = ReferencePolicy(decoder, copied)
        if has_graphs and trainer.cuda_graph_tokens:
            graphs = DecoderGraphs(decoder, trainer.cuda_graph_tokens, lambda failed: self._control.sum(failed) > 0)
        return PolicyForward(
            decoder=decoder,
            reference=reference,
            loss_of=LOSSES[options.algorithm.objective],
            options=options,
            graphs=graphs,
        )

    def _delivery_of(self, decoder: Decoder) -> Delivery:
        options, merges = self._options, ()
        if options.weight_sync.remote_merge is not RemoteMerge.none:
            seed = options.weight_sync.rounding_seed(options.seed)
            merges = planned_merges(decoder.spec, options.model.dtype.value, options.trainer, seed)
        return Delivery(
            decoder, self._control, options.weight_sync, BlockFp8.from_hf_config(options.hf_config),
            key=options.sync_key, host=self._host, merges=merges,
        )  # fmt: skip

    def warm_up(self, lengths: list[int]) -> dict[str, float]:
        """Run forward and backward over made-up sequences and drop the gradients. Weights, moments, random state and
        version do not change.

        Kernels are compiled while engines start, and a microbatch that the device cannot hold is refused before
        anything is sampled.

        Args:
            lengths: tokens of each sequence of one microbatch, the same on every rank.

        Returns:
            "seconds"; on a GPU "peak_device_bytes".

        Raises:
            TrainerError: the device is too small; the message names options that need less memory.
        """
        spec = self.decoder.spec
        replayed = spec.moe if self._options.parity.replay_routing else None
        samples = made_up_samples(lengths, spec.vocab_size, self.policy_version, replayed)
        num_counted = sum(sample.num_valid_tokens for sample in samples)
        denominators = Denominators(num_counted, len(lengths), self.policy_version, num_possible_tokens=num_counted)
        started = time.perf_counter()
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            try:
                stats = self.forward_backward([samples], denominators)
            except torch.OutOfMemoryError as error:
                raise TrainerError(
                    f"rank {self._rank}: a microbatch of {sum(lengths)} tokens does not fit {self._device}: lower "
                    f"trainer.max_microbatch_tokens, which is {self._options.trainer.max_microbatch_tokens}; a smaller "
                    "trainer.lora.rank, trainer.optim.state=int8 or more of trainer.num_ranks need less, too "
                    f"({str(error).partition('. If reserved')[0]})"
                ) from None
            finally:
                self.learner.drop_gradients()
        found = {"seconds": time.perf_counter() - started}
        if self._device.type == "cuda":
            found["peak_device_bytes"] = stats.maxima["memory/peak_device_bytes"]
            torch.cuda.empty_cache()  # staging is taken after this
            torch.cuda.reset_peak_memory_stats(self._device)
        return found

    # ----------------------------------------------------------------------------------------------------------- train

    def forward_backward(self, microbatches: list[list[Sample]], denominators: Denominators) -> LossStats:
        """Add the gradients of these microbatches to those already there. Restarts the count of peak device memory.

        Args:
            microbatches: this rank's, as `trainer.step.microbatches.pack` assigned them; empty ones take part with a
                dummy token.
            denominators: counts of the whole batch, the same on every rank.

        Returns:
            This rank's sums and maxima (see trainer/step/loss.py). Adding the sums, and taking the largest maxima, over
            ranks gives the batch's.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        stats = self._over(microbatches, denominators, learn=True)
        self.learner.add_loss(stats.sums.get("loss/total_sum", 0.0))
        return stats

    def evaluate(self, microbatches: list[list[Sample]], denominators: Denominators) -> LossStats:
        """The loss of these microbatches and its metrics; no gradient. Arguments as in forward_backward."""
        with torch.no_grad():
            return self._over(microbatches, denominators, learn=False)

    def _over(self, microbatches: list[list[Sample]], denominators: Denominators, *, learn: bool) -> LossStats:
        policy = self.policy
        self._control.agree("microbatches and denominators", (len(microbatches), denominators))
        self.learner.check_version(denominators.policy_version)
        accumulator = LossAccumulator()
        with policy.decoder.in_use():
            for samples, extents in zip(microbatches, self._extents(microbatches), strict=True):
                micro = collate(samples, denominators.policy_version, extents)
                part, logprobs_N = policy.loss(micro, denominators)
                if learn:
                    part.loss.backward()
                accumulator.add(part)
                accumulator.show(samples, logprobs_N)
                del part  # its graph, too: the next microbatch may be captured on another stream
        stats = accumulator.result()
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
            if policy.graphs is not None:
                peak_bytes = policy.graphs.with_replays(peak_bytes)
            stats.maxima["memory/peak_device_bytes"] = float(peak_bytes)
        return stats

    def score(self, microbatches: list[list[Sample]], policy_version: int) -> list[list[Scores]]:
        """Log-probabilities of these samples by the policy and its reference, by microbatch and sample; no gradient.
        Microbatches as in forward_backward."""
        policy = self.policy
        self._control.agree("microbatches and version", (len(microbatches), policy_version))
        self.learner.check_version(policy_version)
        with policy.decoder.in_use():
            each = zip(microbatches, self._extents(microbatches), strict=True)
            return [policy.scores(samples, policy_version, extents) for samples, extents in each]

    def _extents(self, microbatches: list[list[Sample]]) -> list[tuple[Extent, ...]]:
        """For each microbatch: how large it is on every rank."""
        mine = [astuple(extent_of(samples)) for samples in microbatches]
        ranks = self._control.of_ranks([int(number) for one in mine for number in one])
        starts = range(0, 4 * len(microbatches), 4)
        of_ranks = [
            [Extent(found[i], found[i + 1], found[i + 2], bool(found[i + 3])) for i in starts] for found in ranks
        ]
        return list(zip(*of_ranks, strict=True))

    def optimizer_step(self, *, ends_version: bool = True) -> OptimStats:
        """Apply the gradients and drop them. If the norm or any rank's loss is not finite, no rank changes anything.

        Args:
            ends_version: whether this is the last update of a step. The policy version rises then, and only if an
                update was applied since it last did.
        """
        return self.learner.update(ends_version=ends_version)

    def shutdown(self) -> None:
        """Leave the link and the process group. Idempotent; the rank cannot be used afterwards."""
        if "delivery" in vars(self):
            self.delivery.close()
        if "policy" in vars(self) and self.policy.graphs is not None:
            self.policy.graphs.forget()  # a graph with exchanges must not outlive the group
        self._control.leave()
