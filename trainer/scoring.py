"""The policy without training: log-probabilities of given sequences, and the operations that compute them.

    Scorer -- build, load -->  logprobs(sequences)      one number per token that has one before it
                               operations(sequences)    trainer.model.comparison, over the same packed tokens
                               save(folder)             a checkpoint of what it computes with, for an engine

Owns: a decoder on one device, outside of a run. Does not own: sampling, comparing. One process, no gradients, no
optimizer.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.conf.architecture.families import read_config
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import ModelConfig, TrainerConfig, TrainMode
from slipstream.trainer.adapter_io import load_adapter, save_merged
from slipstream.trainer.engine_ops.engine_forward import choose_forward
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.trainer.model.comparison import decoder_steps
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.operations import Operation
from slipstream.trainer.moe.replay import RecordedRoutes
from slipstream.trainer.parallel import cut_by_size
from slipstream.trainer.weights.loading import load_weights, open_reader


class Scorer:
    """See the module's docstring.

    Args:
        model, trainer: Sections of the options. Adapters start from trainer.lora.init_from, else they add nothing.
        seed: Of random weights.
        rounding_seed: See `build_decoder`; for save().
        device: "cpu" or "cuda".
    """

    def __init__(
        self, model: ModelConfig, trainer: TrainerConfig, hf_config: JsonObject, *, seed: int, device: str,
        rounding_seed: int | None = None,
    ) -> None:  # fmt: skip
        self.device = torch.device(device)
        self._trainer, self._hf_config = trainer, hf_config
        spec = read_config(hf_config, trainer.numerics.places.mla_norm_eps)
        dtype = getattr(torch, model.dtype.value)
        self.decoder: Decoder = build_decoder(
            spec, dtype=dtype, device=self.device, trainer=trainer, rounding_seed=rounding_seed,
            by=choose_forward(spec, dtype, trainer, self.device),
        )  # fmt: skip
        load_weights(self.decoder, open_reader(model, spec, seed=seed, device=self.device), seed=seed)
        if trainer.mode is TrainMode.lora and trainer.lora.init_from is not None:
            load_adapter(self.decoder, trainer.lora.init_from)
        self.num_scored = 0
        """Sequences that logprobs() is done with."""

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint of the weights, adapters merged into them."""
        save_merged(self.decoder, folder, self._hf_config)

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[Sequence[int]], routes: Sequence[tuple[np.ndarray, np.ndarray]] | None = None
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Per sequence, of every token but the first: its log-probability at temperature 1, and the entropy (nats).

        Args:
            routes: Of each sequence, experts [tokens - 1, layers with experts, K] to use instead of the router's
                choice, and whether each position has some.
        """
        logprobs: list[list[float]] = []
        entropies: list[list[float]] = []
        for part in cut_by_size(sequences, len, self._trainer.max_microbatch_tokens):
            tokens_T, positions_T, starts = self._packed(part)
            recorded = None
            if routes is not None:
                recorded = self._recorded(routes[len(logprobs) : len(logprobs) + len(part)])
            hidden_TH = self.decoder(tokens_T, positions_T, starts, recorded)
            logprobs_N, entropy_N = self._head(hidden_TH, tokens_T, positions_T)
            counts = [len(sequence) - 1 for sequence in part]
            logprobs += [one.tolist() for one in logprobs_N.split(counts)]
            entropies += [one.tolist() for one in entropy_N.split(counts)]
            self.num_scored += len(part)
        return logprobs, entropies

    def operations(self, sequences: Sequence[Sequence[int]], *, adapted: bool = True) -> list[Operation]:
        """The decoder's operations over these sequences, packed; with its adapters or without."""
        _, positions_T, starts = self._packed(sequences)
        by = self.decoder.by if adapted else self.decoder.by.without_adapters()
        return decoder_steps(self.decoder, positions_T, starts, by)

    @torch.no_grad()
    def logprobs_of_hidden(self, hidden_TH: Tensor, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[N]: log-probabilities as in `logprobs`, of packed sequences whose final hidden states are given."""
        tokens_T, positions_T, _ = self._packed(sequences)
        return self._head(hidden_TH, tokens_T, positions_T)[0]

    def _recorded(self, routes: Sequence[tuple[np.ndarray, np.ndarray]]) -> RecordedRoutes:
        """Routes of packed sequences; the last token of each has none."""
        experts = [np.pad(experts, ((0, 1), (0, 0), (0, 0))) for experts, _ in routes]
        is_recorded = [np.pad(has_route, (0, 1)) for _, has_route in routes]
        packed = [torch.from_numpy(np.concatenate(parts)).to(self.device) for parts in (experts, is_recorded)]
        return RecordedRoutes(packed[0], packed[1])

    def _packed(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences one after the other, as Decoder.forward takes them: token ids, positions, starts."""
        tokens_T = torch.tensor([token for sequence in sequences for token in sequence], device=self.device)
        positions_T = torch.cat([torch.arange(len(sequence)) for sequence in sequences]).to(self.device)
        return tokens_T, positions_T, torch.tensor([0, *map(len, sequences)]).cumsum(0)

    def _head(self, hidden_TH: Tensor, tokens_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        (predicted_N,) = positions_T.nonzero(as_tuple=True)  # every token but the first of its sequence
        return self.decoder.logprobs(hidden_TH[predicted_N - 1], tokens_T[predicted_N], self._trainer)
