"""A packed microbatch: sequences one after the other in one tensor, without padding, and where each of them lies.

Shapes: T packed tokens, N heads, D head_dim, B sequences, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.trainer.parallel import on_device

LONG = 1024
"""In tokens: a sequence of this length fills the device by itself."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where sequences lie in a microbatch; made once per forward and shared by all layers.

    Example: lengths (2, 3) give cu_seqlens [0, 2, 5] and a padded (2, 3) batch. Flattened, its rows [0, 1, 3, 4, 5] are
    the tokens.
    """

    cu_seqlens: Tensor
    """int32 [B + 1] on the compute device."""
    num_sequences: int
    max_length: int
    """Tokens of the longest; at least, where lengths are on the device alone."""
    starts: tuple[int, ...]
    """cu_seqlens on the host; empty: lengths are on the device alone."""
    padded_row_T: Tensor
    """int64 [T]; token t is row padded_row[t] of the padded batch flattened to [B * L]."""
    most_tokens: int | None = None
    """T of the ep_rank that has most; None: without expert parallelism, or not known."""
    keys: PackedSequences | None = None
    """Where the keys of each sequence lie, if it is one chunk of a longer one (context.py): keys from that one's first
    token to the chunk's last. None: at its queries."""
    gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Makes of this rank's keys and values those that `keys` tells of. None: they are here."""
    block_masks: dict[int | None, Any] = field(default_factory=dict)
    """flex_attention's mask of each window in use, made by the first layer that needs it."""

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, num_tokens: int, device: torch.device, *, row_length: int | None = None
    ) -> PackedSequences:
        """Where sequences with these starts lie.

        Args:
            cu_seqlens: int [B + 1], preferably on the CPU: the host reads the lengths, because they decide shapes.
            row_length: Tokens of a row of the padded batch, where other microbatches will have the same shapes; None:
                those of the longest sequence.

        Raises:
            ValueError: it does not rise from 0 to num_tokens.
        """
        starts = cu_seqlens.to("cpu", torch.int64)
        lengths = starts.diff()
        if starts.numel() == 0 or starts[0] != 0 or starts[-1] != num_tokens or bool((lengths < 0).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens {num_tokens}, got {starts.tolist()}")
        max_length = int(lengths.max()) if lengths.numel() else 0
        max_length = max_length if row_length is None else row_length
        shifts = torch.arange(lengths.numel()) * max_length - starts[:-1]
        padded_rows = torch.arange(num_tokens) + torch.repeat_interleave(shifts, lengths)
        cu_seqlens, padded_row_T = (on_device(one, device) for one in (starts.int(), padded_rows))
        return cls(cu_seqlens, lengths.numel(), max_length, tuple(starts.tolist()), padded_row_T)

    @property
    def positions_T(self) -> Tensor:
        """int64 [T]; position of each token in its own sequence."""
        return self.padded_row_T % max(1, self.max_length)

    @property
    def is_long(self) -> bool:
        """Whether sequences are, on average, long enough to be computed one after the other."""
        return bool(self.starts) and self.starts[-1] >= LONG * self.num_sequences > 0

    def pad(self, x: Tensor) -> Tensor:
        """[T, N, D] -> [B, N, L, D], zeros on the right."""
        rows = x.new_zeros(self.num_sequences * self.max_length, *x.shape[1:]).index_copy(0, self.padded_row_T, x)
        return rows.view(self.num_sequences, self.max_length, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, N, L, D] -> [T, N, D]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.padded_row_T)
