"""TrainerRank: one process of the trainer. Loads its part of the policy, trains it, publishes it, saves it.

Owns the order of collectives inside one rank, and the policy version, which rises by one with every step that changed
the policy. Does not own forward passes (step/policy_forward.py), the way to engines (delivery.py), the loop
(orchestrator/loop/controller.py), Ray, or metrics: it returns what it measures.

    load -> ( ( forward_backward* -> optimizer_step )+ -> publish )*     save_* and load_state between steps; shutdown
                    |                    |
         gradients add up        drops them, also when it refuses the update

A step has one update, or several of one batch: `score` comes before them then, and the version rises with the last.

Invariant: all ranks make the same calls in the same order, with equally many microbatches: every layer is a
collective. Calls that take host-side arguments compare them over the control group first, so that a
disagreement is an error and not a hang.

"""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conf.architecture.families import read_config
from conf.schema import (
    AlgorithmConfig,
    Init,
    MergeRounding,
    ModelConfig,
    Objective,
    ParityConfig,
    TrainerConfig,
    TrainMode,
    WeightSyncConfig,
)
from trainer.adapter_io import gather_adapter, load_adapter, save_adapter, save_merged
from trainer.checkpoint.background_writes import BackgroundWrites
from trainer.checkpoint.host_copies import HostCopies
from trainer.checkpoint.rank_state import read_rank_state, state_layout, write_rank_state
from trainer.delivery.delivery import Delivery
from trainer.engine_ops.choose_forward import choose_forward
from trainer.errors import LayoutError, TrainerError
from trainer.model.build_decoder import build_decoder
from trainer.model.decoder import Decoder
from trainer.model.graphs import DecoderGraphs, refusal_of_graphs
from trainer.model.reference import ReferencePolicy
from trainer.model.shard_decoder import dense_trainable, expert_trainable
from trainer.parallel import ParallelLayout, sharded_rows, take_device
from trainer.process_group import ControlGroup
from trainer.step.loss import LossAccumulator, policy_loss, sft_loss
from trainer.step.microbatches import collate
from trainer.step.optim import ShardedAdamW, TrainableShard
from trainer.step.policy_forward import Loss, PolicyForward
from trainer.step.preference_loss import dpo_loss
from trainer.step.warm_up import made_up_samples
from trainer.types import Denominators, LossStats, OptimStats, Sample, Scores
from trainer.weights.loading import load_weights, open_reader
from trainer.weights.quantization import BlockFp8

logger = logging.getLogger(__name__)

LOSSES: dict[Objective, Loss] = {Objective.policy: policy_loss, Objective.sft: sft_loss, Objective.dpo: dpo_loss}


class TrainerRank:
    """One rank. Every public method is collective over the trainer's ranks."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        sampling_temperature: float,
        weight_sync: WeightSyncConfig,
        seed: int,
        num_steps: int,
        rank: int,
        world_size: int,
        rendezvous: str,
        device: str,
        hf_config: dict[str, Any],
        sync_key: bytes,
        host: str = "127.0.0.1",
        parity: ParityConfig | None = None,
        engine_ranks: int = 1,
    ) -> None:
        """Join the process group.

        Args:
            sampling_temperature: softmax temperature of the rollouts; log-probabilities here use the same. Fine-tuning
                has none, and uses 1.
            num_steps: updates of the run; the learning rate's schedule ends there.
            rendezvous: "tcp://host:port" of rank 0. Unused with one rank.
            device: "cpu" or "cuda"; rank r takes the visible GPU r modulo their number.
            hf_config: the policy's Hugging Face config.
            sync_key: signs the control messages of a publish.
            host: address at which engines' links reach this rank; loopback when all of them are on this machine.
            engine_ranks: tensor-parallel ranks of an engine; trainer.numerics.match=bitwise adds as they do.
        """
        if world_size != trainer.num_ranks:
            raise LayoutError(
                f"rank {rank}: started in a world of {world_size}, but trainer.num_ranks={trainer.num_ranks}"
            )
        self._model, self._trainer, self._algorithm, self._weight_sync = model, trainer, algorithm, weight_sync
        self._temperature = 1.0 if algorithm.objective is not Objective.policy else sampling_temperature
        self._seed, self._num_steps = seed, num_steps
        self._rank, self._world_size, self._hf_config, self._sync_key = rank, world_size, hf_config, sync_key
        self._host, self._engine_ranks = host, engine_ranks
        self._parity = parity or ParityConfig()
        self._device = take_device(device, rank)
        self._writes, self._copies = BackgroundWrites(), HostCopies(self._device)
        self._control = ControlGroup(rank, world_size, rendezvous, self._device)
        torch.manual_seed(seed)
        self._policy_version = 0
        self._is_changed = False
        """Whether an update was applied that no version counts yet."""
        self._local_loss = 0.0
        self._state_layout = state_layout(model, trainer, hf_config, self._device.type)
        self._decoder: Decoder | None = None
        self._graphs: DecoderGraphs | None = None
        self._delivery: Delivery | None = None

    @property
    def policy_version(self) -> int:
        """Steps that changed the policy since the run began."""
        return self._policy_version

    @property
    def decoder(self) -> Decoder:
        """This rank's part of the policy; after load()."""
        return self._loaded()

    # ------------------------------------------------------------------------------------------------------------ load

    def load(self) -> dict[str, Any]:
        """Build the decoder, fill its weights, set up the optimizer. Returns facts for the log."""
        started = time.perf_counter()
        spec = read_config(self._hf_config, self._trainer.numerics.places.mla_norm_eps)
        layout = ParallelLayout.create(self._world_size, self._trainer.ep_size, self._rank, self._device)
        dtype = getattr(torch, self._model.dtype.value)
        by = choose_forward(spec, dtype, self._trainer, self._device, self._weight_sync.mode, self._engine_ranks)
        decoder = build_decoder(
            spec, dtype=dtype, device=self._device, trainer=self._trainer, layout=layout, by=by,
            rounding_seed=self._seed if self._weight_sync.rounding is MergeRounding.dithered else None,
        )  # fmt: skip
        reader = open_reader(self._model, spec, seed=self._seed, device=self._device)
        report = load_weights(decoder, reader, seed=self._seed)
        is_full, lora = self._trainer.mode is TrainMode.full, self._trainer.lora
        starts_from_base = not is_full and lora.init_from is None
        num_unadapted = 0 if is_full or lora.init_from is None else load_adapter(decoder, lora.init_from)
        self._decoder = decoder
        self._trainable = [*dense_trainable(decoder), *expert_trainable(decoder)]
        self._shards = [TrainableShard(name, sharded_rows(name, param).detach()) for name, param in self._trainable]
        self._optimizer = ShardedAdamW(
            self._shards,
            self._trainer.optim,
            self._num_steps,
            group=dist.group.WORLD if self._world_size > 1 else None,
            device=self._device,
        )
        reference = (
            ReferencePolicy(decoder, None if starts_from_base else [shard.values for shard in self._shards])
            if self._algorithm.needs_reference
            else None
        )
        refusal = refusal_of_graphs(decoder, self._device)
        most_tokens = self._trainer.cuda_graph_tokens
        self._graphs = DecoderGraphs(decoder, most_tokens) if refusal is None and most_tokens else None
        self._forward = PolicyForward(
            decoder, reference, LOSSES[self._algorithm.objective], self._algorithm, self._temperature,
            self._trainer.logprob_chunk_tokens(spec.vocab_size), self._parity.mask_log_ratio, self._device,
            self._graphs,
        )  # fmt: skip
        self._delivery = Delivery(
            decoder, self._control, self._weight_sync, BlockFp8.from_hf_config(self._hf_config), lora,
            is_packed=bool(report.num_packed_bytes), key=self._sync_key, host=self._host, device=self._device,
        )  # fmt: skip
        num_trainable = self._control.sum(sum(shard.values.numel() for shard in self._shards))
        self._writes.begin(partial(self._copies.prepare, self._checkpoint_bytes()))
        return {
            "rank": self._rank,
            "device": str(self._device),
            "backends": decoder.backends,
            "cuda_graphs": f"none ({refusal})" if refusal is not None else f"up to {most_tokens} tokens",
            "num_parameters": sum(math.prod(meta.shape) for meta in spec.checkpoint_tensors(self._model.dtype.value)),
            "num_trainable_parameters": num_trainable,
            "loaded_tensors": report.num_tensors,
            "loaded_bytes": report.num_bytes,
            "packed_bytes": report.num_packed_bytes,
            "ignored_tensors": list(report.ignored),
            "unadapted_matrices": num_unadapted,
            "mtp_tensors": report.num_mtp_tensors,
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
        replayed = spec.moe if self._parity.replay_routing else None
        samples = made_up_samples(lengths, spec.vocab_size, self._policy_version, replayed)
        num_counted = sum(sample.num_valid_tokens for sample in samples)
        denominators = Denominators(num_counted, len(lengths), self._policy_version, num_possible_tokens=num_counted)
        started = time.perf_counter()
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            try:
                stats = self.forward_backward([samples], denominators)
            except torch.OutOfMemoryError as error:
                raise TrainerError(
                    f"rank {self._rank}: a microbatch of {sum(lengths)} tokens does not fit {self._device}: lower "
                    f"trainer.max_microbatch_tokens, which is {self._trainer.max_microbatch_tokens}; a smaller "
                    "trainer.lora.rank, trainer.optim.state=int8 or more of trainer.num_ranks need less, too "
                    f"({str(error).partition('. If reserved')[0]})"
                ) from None
            finally:
                self._drop_gradients()
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
        self._local_loss += stats.sums.get("loss/total_sum", 0.0)
        return stats

    def evaluate(self, microbatches: list[list[Sample]], denominators: Denominators) -> LossStats:
        """The loss of these microbatches and its metrics; no gradient. Arguments as in forward_backward."""
        with torch.no_grad():
            return self._over(microbatches, denominators, learn=False)

    def _over(self, microbatches: list[list[Sample]], denominators: Denominators, *, learn: bool) -> LossStats:
        self._loaded()
        self._control.agree("microbatches and denominators", (len(microbatches), denominators))
        self._check_version(denominators.policy_version)
        accumulator = LossAccumulator()
        for samples in microbatches:
            part, logprobs_N = self._forward.loss(collate(samples, denominators.policy_version), denominators)
            if learn:
                part.loss.backward()
            accumulator.add(part)
            accumulator.show(samples, logprobs_N)
            del part  # its graph, too: the next microbatch may be captured on another stream
        stats = accumulator.result()
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
            if self._graphs is not None:
                peak_bytes = self._graphs.with_replays(peak_bytes)
            stats.maxima["memory/peak_device_bytes"] = float(peak_bytes)
        return stats

    def score(self, microbatches: list[list[Sample]], policy_version: int) -> list[list[Scores]]:
        """Log-probabilities of these samples by the policy and its reference, by microbatch and sample; no gradient.
        Microbatches as in forward_backward.
        """
        self._loaded()
        self._control.agree("microbatches and version", (len(microbatches), policy_version))
        self._check_version(policy_version)
        return [self._forward.scores(samples, policy_version) for samples in microbatches]

    def _check_version(self, version: int) -> None:
        if version != self._policy_version:
            raise TrainerError(
                f"rank {self._rank}: a batch for policy version {version} came to version {self._policy_version}"
            )

    def optimizer_step(self, *, ends_version: bool = True) -> OptimStats:
        """Apply the gradients and drop them. If the norm or any rank's loss is not finite, no rank changes anything.

        Args:
            ends_version: whether this is the last update of a step. The policy version rises then, and only if an
                update was applied since it last did.
        """
        self._loaded()
        for (name, param), shard in zip(self._trainable, self._shards, strict=True):
            if sharded_rows(name, param).data_ptr() != shard.values.data_ptr():
                raise TrainerError(
                    f"rank {self._rank}: the storage of {name} was replaced; the optimizer would update the old one"
                )
        gradients = [None if p.grad is None else sharded_rows(name, p.grad) for name, p in self._trainable]
        result = self._optimizer.step(gradients, self._local_loss)
        self._drop_gradients()
        self._is_changed = self._is_changed or result.is_finite
        if ends_version and self._is_changed:
            self._policy_version, self._is_changed = self._policy_version + 1, False
        if not result.is_finite:
            logger.warning(
                "rank %d refused an update at version %d: gradient norm %s, or a loss, is not finite",
                self._rank, self._policy_version, result.grad_norm,
            )  # fmt: skip
        return OptimStats(self._policy_version, result.grad_norm, result.lr, result.is_finite)

    # --------------------------------------------------------------------------------------------------------- publish

    @property
    def delivery(self) -> Delivery:
        """This rank's way to the engines; after load()."""
        if self._delivery is None:
            raise TrainerError(f"rank {self._rank}: call load() first")
        return self._delivery

    # ------------------------------------------------------------------------------------------------------------ save

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter in PEFT's format."""
        save_adapter(self.decoder, folder, self._base_path)

    def save_merged(self, folder: str | Path) -> None:
        """Write the merged model as a Hugging Face checkpoint."""
        save_merged(self.decoder, folder, self._hf_config)

    def begin_checkpoint(self, folder: str | Path, adapter: str | Path | None = None) -> None:
        """Copy to the host what an exact resume needs, and begin to write it: every rank its own file. The next step
        may follow at once; has_written() says when the files are there.

        Args:
            folder: Where.
            adapter: Where rank 0 begins to write the adapter in PEFT's format, too.
        """
        self._loaded()
        self._control.agree("folder and policy version", [str(folder), self._policy_version])
        progress = {"policy_version": self._policy_version, "num_updates": self._optimizer.num_updates}
        self._writes.finish()  # the memory for copies is prepared, and nothing is written from it any more
        self._copies.begin()
        copied = {name: self._copies.copy(tensor) for name, tensor in self._state_tensors().items()}
        gathered = None if adapter is None else gather_adapter(self.decoder, self._base_path, self._copies.copy)
        self._copies.wait()
        self._writes.begin(partial(write_rank_state, Path(folder), self._rank, copied, self._state_layout, progress))
        if adapter is not None and gathered is not None:
            self._writes.begin(partial(gathered.write, adapter))

    def has_written(self) -> bool:
        """Whether this rank's files of begin_checkpoint() are there. Raises what kept one from it, once."""
        return self._writes.are_done()

    def save_state(self, folder: str | Path) -> None:
        """begin_checkpoint(), and wait until all ranks' files are there."""
        self.begin_checkpoint(folder)
        self._writes.finish()
        self._control.agree("policy version", self._policy_version)

    def load_state(self, folder: str | Path) -> None:
        """Continue exactly where `save_state` stopped. If any rank's state does not fit, no rank changes anything.

        Raises:
            CheckpointError: this rank's files are missing, or of another layout.
            TrainerError: another rank could not read its files, or the ranks' files have different versions.
        """
        self._loaded()
        needed = {name: list(tensor.shape) for name, tensor in self._state_tensors().items()}
        error: Exception | None = None
        tensors: dict[str, Tensor] = {}
        progress: dict[str, int] = {}
        try:
            tensors, progress = read_rank_state(Path(folder), self._rank, self._state_layout, needed)
        except TrainerError as caught:
            error = caught  # the other ranks wait in the next collective: raise after it
        try:
            self._control.agree(f"state in {folder}", "unreadable" if error else progress)
        except TrainerError:
            if error is None:
                raise
        if error is not None:
            raise error
        for shard in self._shards:
            shard.values.copy_(tensors[f"{shard.name}.value"])
        self._optimizer.load_state_tensors(tensors, progress["num_updates"])
        torch.set_rng_state(tensors["rng.cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.device"], self._device)
        self._drop_gradients()
        self._policy_version = progress["policy_version"]

    @property
    def _base_path(self) -> str | None:
        """The checkpoint that adapters are for."""
        return self._model.path if self._model.init is Init.checkpoint else None

    def _checkpoint_bytes(self) -> int:
        """Host memory that this rank's copies of a checkpoint take, on rank 0 with the whole adapter."""
        tensors = self._state_tensors()
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._rank == 0 and self._trainer.mode is TrainMode.lora:
            num_bytes += self._world_size * sum(shard.values.nbytes for shard in self._shards)
        return num_bytes

    def _state_tensors(self) -> dict[str, Tensor]:
        """Parameters, moments and random state of this rank, by name."""
        tensors = {f"{shard.name}.value": shard.values for shard in self._shards}
        tensors |= self._optimizer.state_tensors()
        tensors["rng.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["rng.device"] = torch.cuda.get_rng_state(self._device)
        return tensors

    def shutdown(self) -> None:
        """Leave the link and the process group. Idempotent; the rank cannot be used afterwards."""
        if self._delivery is not None:
            self._delivery.close()
        self._control.leave()

    # --------------------------------------------------------------------------------------------------------- helpers

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise TrainerError(f"rank {self._rank}: call load() first")
        return self._decoder

    def _drop_gradients(self) -> None:
        for _, param in self._trainable:
            param.grad = None
        self._local_loss = 0.0
