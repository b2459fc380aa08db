"""TrainerRank: one process of the trainer. Loads its part of the policy, trains it, publishes it, saves it.

Owns the order of collectives inside one rank. Does not own forward passes (step/policy_forward.py), parameters and
their updates (step/learner.py), the way to engines (delivery.py), the loop (orchestrator/loop/controller.py), Ray, or
metrics: it returns what it measures.

    load -> ( ( forward_backward* -> optimizer_step )+ -> publish )*     save_* and load_state between steps; shutdown
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
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.conf.architecture.families import read_config
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import (
    Init,
    MergeRounding,
    Objective,
    RemoteMerge,
    TrainMode,
)
from slipstream.trainer.adapter_io import gather_adapter, load_adapter, save_adapter, save_merged
from slipstream.trainer.checkpoint.background_writes import BackgroundWrites
from slipstream.trainer.checkpoint.host_copies import HostCopies
from slipstream.trainer.checkpoint.keeper import Address, Readiness, take
from slipstream.trainer.checkpoint.kept_states import KeptStates
from slipstream.trainer.checkpoint.rank_state import (
    State,
    read_rank_state,
    read_rank_state_parts,
    state_layout,
    write_rank_state,
)
from slipstream.trainer.delivery.delivery import Delivery
from slipstream.trainer.engine_ops.choose_forward import choose_forward
from slipstream.trainer.errors import LayoutError, TrainerError
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.graphs import DecoderGraphs, refusal_of_graphs
from slipstream.trainer.model.reference import ReferencePolicy
from slipstream.trainer.model.shard_decoder import sharded_dense
from slipstream.trainer.model.whole_weights import extra_bytes
from slipstream.trainer.options import TrainerOptions
from slipstream.trainer.parallel import ParallelLayout, take_device
from slipstream.trainer.process_group import ControlGroup
from slipstream.trainer.step.learner import Learner
from slipstream.trainer.step.loss import LossAccumulator, policy_loss, sft_loss
from slipstream.trainer.step.microbatches import collate, extent_of
from slipstream.trainer.step.policy_forward import Loss, PolicyForward
from slipstream.trainer.step.preference_loss import dpo_loss
from slipstream.trainer.step.warm_up import made_up_samples
from slipstream.trainer.types import Denominators, Extent, LossStats, OptimStats, Sample, Scores
from slipstream.trainer.weights.factors import planned_merges
from slipstream.trainer.weights.loading import load_weights, open_reader
from slipstream.trainer.weights.quantization import BlockFp8

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

LOSSES: dict[Objective, Loss] = {Objective.policy: policy_loss, Objective.sft: sft_loss, Objective.dpo: dpo_loss}


class TrainerRank:
    """One rank. Every public method is collective over the trainer's ranks."""

    def __init__(self, options: TrainerOptions, *, rank: int = 0, host: str = "127.0.0.1") -> None:
        """Join the process group.

        Args:
            host: address at which engines' links reach this rank; loopback when all of them are on this machine.
        """
        world_size, wanted = options.world_size, options.trainer.num_ranks
        if world_size != wanted:
            raise LayoutError(f"rank {rank}: started in a world of {world_size}, but trainer.num_ranks={wanted}")
        self._options, self._rank, self._host = options, rank, host
        self._device = take_device(options.device, rank)
        self._writes, self._copies = BackgroundWrites(), HostCopies(self._device)
        self._kept = KeptStates(rank, options.sync_key, self._device)
        self._control = ControlGroup(rank, world_size, options.rendezvous, self._device)
        torch.manual_seed(options.seed)
        self._policy: PolicyForward | None = None
        self._learner: Learner | None = None
        self._delivery: Delivery | None = None

    @property
    def policy_version(self) -> int:
        """Steps that changed the policy since the run began."""
        return 0 if self._learner is None else self._learner.policy_version

    @property
    def decoder(self) -> Decoder:
        """This rank's part of the policy; after load()."""
        return self.policy.decoder

    @property
    def policy(self) -> PolicyForward:
        """Its forward passes; after load()."""
        return self._of_load(self._policy)

    @property
    def learner(self) -> Learner:
        """What it trains; after load()."""
        return self._of_load(self._learner)

    # ------------------------------------------------------------------------------------------------------------ load

    def load(self) -> JsonObject:
        """Build the decoder, fill its weights, set up the optimizer. Returns facts for the log."""
        started, options, trainer = time.perf_counter(), self._options, self._options.trainer
        spec = read_config(options.hf_config, trainer.numerics.places.mla_norm_eps)
        layout = ParallelLayout.create(options.world_size, trainer.ep_size, self._rank, self._device, trainer.cp_size)
        dtype = getattr(torch, options.model.dtype.value)
        rounding_seed = options.seed if options.weight_sync.rounding is MergeRounding.dithered else None
        decoder = build_decoder(
            spec, dtype=dtype, device=self._device, trainer=trainer, layout=layout, rounding_seed=rounding_seed,
            by=choose_forward(spec, dtype, trainer, self._device, options.weight_sync.mode, options.engine_ranks),
            may_be_whole=True,
        )  # fmt: skip
        reader = open_reader(options.model, spec, seed=options.seed, device=self._device)
        report = load_weights(decoder, reader, seed=options.seed)
        is_full, lora = trainer.mode is TrainMode.full, trainer.lora
        starts_from_base = not is_full and lora.init_from is None
        num_unadapted = 0 if is_full or lora.init_from is None else load_adapter(decoder, lora.init_from)
        learner = Learner(decoder, trainer.optim, options.num_steps, rank=self._rank, device=self._device)
        reference = (
            ReferencePolicy(decoder, None if starts_from_base else [shard.values for shard in learner.shards])
            if options.algorithm.needs_reference
            else None
        )
        refusal, most_tokens = refusal_of_graphs(decoder, self._device), trainer.cuda_graph_tokens
        graphs = None
        if refusal is None and most_tokens:
            graphs = DecoderGraphs(decoder, most_tokens, lambda failed: self._control.sum(failed) > 0)
        self._learner, self._policy = (
            learner,
            PolicyForward(
                decoder=decoder,
                reference=reference,
                loss_of=LOSSES[options.algorithm.objective],
                algorithm=options.algorithm,
                temperature=options.temperature,
                chunk_tokens=trainer.logprob_chunk_tokens(spec.vocab_size),
                mask_log_ratio=options.parity.mask_log_ratio,
                device=self._device,
                graphs=graphs,
            ),
        )
        self._delivery = Delivery(
            decoder, self._control, options.weight_sync, BlockFp8.from_hf_config(options.hf_config), lora,
            is_packed=bool(report.num_packed_bytes), key=options.sync_key, host=self._host, device=self._device,
            merges=() if options.weight_sync.remote_merge is RemoteMerge.none
            else planned_merges(spec, options.model.dtype.value, trainer, rounding_seed),
        )  # fmt: skip
        num_trainable = self._control.sum(sum(shard.values.numel() for shard in learner.shards))
        self._writes.begin(partial(self._copies.prepare, self._checkpoint_bytes()))
        return {
            "rank": self._rank,
            "device": str(self._device),
            "backends": decoder.backends,
            "dense_weights": "layer by layer" if decoder.whole is None else "once a step",
            "whole_bytes": extra_bytes(sharded_dense(decoder), layout.world_size),
            "cuda_graphs": f"none ({refusal})" if refusal is not None else f"up to {most_tokens} tokens",
            "num_parameters": sum(math.prod(meta.shape) for meta in spec.checkpoint_tensors(options.model.dtype.value)),
            "num_trainable_parameters": num_trainable,
            "loaded_tensors": report.num_tensors,
            "loaded_bytes": report.num_bytes,
            "packed_bytes": report.num_packed_bytes,
            "ignored_tensors": list(report.ignored),
            "unadapted_matrices": num_unadapted,
            "mtp_tensors": report.num_mtp_tensors,
            "state_bytes": self._state_bytes,
            "load_s": time.perf_counter() - started,
        }

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
        Microbatches as in forward_backward.
        """
        policy = self.policy
        self._control.agree("microbatches and version", (len(microbatches), policy_version))
        self.learner.check_version(policy_version)
        with policy.decoder.in_use():
            each = zip(microbatches, self._extents(microbatches), strict=True)
            return [policy.scores(samples, policy_version, extents) for samples, extents in each]

    def _extents(self, microbatches: list[list[Sample]]) -> list[tuple[Extent, ...]]:
        """Of each microbatch: how large it is on every rank."""
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

    # --------------------------------------------------------------------------------------------------------- publish

    @property
    def delivery(self) -> Delivery:
        """This rank's way to the engines; after load()."""
        return self._of_load(self._delivery)

    # ------------------------------------------------------------------------------------------------------------ save

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter in PEFT's format."""
        save_adapter(self.decoder, folder, self._base_path)

    def save_merged(self, folder: str | Path) -> None:
        """Write the merged model as a Hugging Face checkpoint."""
        save_merged(self.decoder, folder, self._options.hf_config)

    def begin_checkpoint(self, folder: str | Path, adapter: str | Path | None = None) -> None:
        """Copy to the host what an exact resume needs, and begin to write it: every rank its own file. The next step
        may follow at once; has_written() says when the files are there.

        Args:
            folder: Where.
            adapter: Where rank 0 begins to write the adapter in PEFT's format, too.
        """
        learner = self.learner
        self._control.agree("folder and policy version", [str(folder), learner.policy_version])
        self._writes.finish()  # the memory for copies is prepared, and nothing is written from it any more
        self._copies.begin()
        copied = {name: self._copies.copy(tensor) for name, tensor in learner.state_tensors().items()}
        gathered = None if adapter is None else gather_adapter(self.decoder, self._base_path, self._copies.copy)
        self._copies.wait()
        layout, progress = self._state_layout, learner.progress
        self._writes.begin(partial(write_rank_state, Path(folder), self._rank, copied, layout, progress))
        if adapter is not None and gathered is not None:
            self._writes.begin(partial(gathered.write, adapter))

    def has_written(self) -> bool:
        """Whether this rank's files of begin_checkpoint() are there. Raises what kept one from it, once."""
        return self._writes.are_done()

    def save_state(self, folder: str | Path) -> None:
        """begin_checkpoint(), and wait until all ranks' files are there."""
        self.begin_checkpoint(folder)
        self._writes.finish()
        self._control.agree("policy version", self.policy_version)

    def load_state(self, folder: str | Path) -> None:
        """Continue exactly where `save_state` stopped. If any rank's state does not fit, no rank changes anything.

        Raises:
            CheckpointError: this rank's files are missing, or of another layout.
            TrainerError: another rank could not read its files, or the ranks' files have different versions.
        """
        self._restore(f"state in {folder}", partial(read_rank_state, Path(folder)))

    def keep_states(self, keepers: Sequence[Address]) -> None:
        """From now on keep() sends to these."""
        self._kept.use(keepers, self._state_bytes)

    def keep(self, number: int) -> Readiness:
        """Copy this rank's state, and begin to send it to its keepers, if all ranks are ready for that: their states
        before it are whole there. The next call may follow at once.

        Args:
            number: the same on every rank, and larger than those before.

        Returns:
            Of all ranks together; now: the state is on its way.
        """
        mine = self._kept.readiness()
        if self._control.sum(mine is Readiness.never):
            return Readiness.never
        if self._control.sum(mine is Readiness.later):
            return Readiness.later
        self._kept.begin(number, self.learner.state_tensors(), self._state_layout, self.learner.progress)
        return Readiness.now

    def settle(self) -> int | None:
        """Drop gradients, and wait for what is being written or sent: who asked for it is gone. Not collective.

        Returns:
            The policy version of the state that is left; None: a step's updates have begun, and have not ended.
        """
        self.learner.drop_gradients()
        self._writes.settle()
        self._kept.settle()
        return None if self.learner.is_in_a_step else self.learner.policy_version

    def load_kept(self, keeper: Address, number: int) -> None:
        """Continue from a state that keep() sent. Raises as load_state(), and:

        OSError: the keeper does not give it.
        """
        data = take(keeper, self._options.sync_key, self._rank, number)
        self._restore("state in memory", partial(read_rank_state_parts, data))

    def _restore(self, what: str, read: Callable[[int, JsonObject, dict[str, list[int]]], State]) -> None:
        learner = self.learner
        needed = {name: list(tensor.shape) for name, tensor in learner.state_tensors().items()}
        error: Exception | None = None
        tensors: dict[str, Tensor] = {}
        progress: dict[str, int] = {}
        try:
            tensors, progress = read(self._rank, self._state_layout, needed)
        except TrainerError as caught:
            error = caught  # the other ranks wait in the next collective: raise after it
        try:
            self._control.agree(what, "unreadable" if error else progress)
        except TrainerError:
            if error is None:
                raise
        if error is not None:
            raise error
        learner.restore(tensors, progress)

    @property
    def _state_layout(self) -> JsonObject:
        return state_layout(self._options.model, self._options.trainer, self._options.hf_config, self._device.type)

    @property
    def _base_path(self) -> str | None:
        """The checkpoint that adapters are for."""
        model = self._options.model
        return model.path if model.init is Init.checkpoint else None

    def _checkpoint_bytes(self) -> int:
        """Host memory that this rank's copies of a checkpoint take, on rank 0 with the whole adapter."""
        num_bytes = self._state_bytes
        if self._rank == 0 and self._options.trainer.mode is TrainMode.lora:
            num_bytes += self._options.world_size * self.learner.num_bytes
        return num_bytes

    @property
    def _state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.learner.state_tensors().values())

    def shutdown(self) -> None:
        """Leave the link and the process group. Idempotent; the rank cannot be used afterwards."""
        if self._delivery is not None:
            self._delivery.close()
        if self._policy is not None and self._policy.graphs is not None:
            self._policy.graphs.forget()  # a graph with exchanges must not outlive the group
        self._control.leave()

    # --------------------------------------------------------------------------------------------------------- helpers

    def _of_load(self, made: Made | None) -> Made:
        if made is None:
            raise TrainerError(f"rank {self._rank}: call load() first")
        return made
