"""The experts that an engine recorded for the tokens of a microbatch, and what the trainer does with them.

Rollout Routing Replay (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers", https://arxiv.org/abs/2510.11370): the trainer takes the engine's choice of experts and computes their
weights from its own router's scores, so that gradients reach the router as they do without replay.

    engine:   scores -> the best K  ------------------ recorded ------------------+
    trainer:  scores -> the best K (only counted: how many differ?)               v
                    +------------------------------------------> weights of the recorded K -> experts

Owns which choice a token gets. Does not own weights (router.py) nor where routes come from (rollout/routes.py).
Invariant: a token without a recorded route gets the trainer's own choice.

Shapes: T packed tokens, L layers with experts, K experts of a token.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    experts_TK: Tensor
    """uint8 or int16; meaningless where no route is recorded."""
    is_recorded_T: Tensor

    def instead_of(self, own_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The experts to use.

        Args:
            own_TK: int64, the trainer's own choice.

        Returns:
            experts_TK in int64, and how many recorded experts the trainer would not have chosen (int64 scalar).
        """
        recorded_TK = self.experts_TK.to(torch.int64)
        experts_TK = torch.where(self.is_recorded_T[:, None], recorded_TK, own_TK)
        return experts_TK, (experts_TK[:, :, None] != own_TK[:, None, :]).all(-1).sum()


@dataclass(frozen=True, slots=True)
class RecordedRoutes:
    """The recorded experts of one microbatch, on the device of its tokens."""

    experts_TLK: Tensor
    """uint8 or int16."""
    is_recorded_T: Tensor
    flipped: list[Tensor] = field(default_factory=list)
    """For each layer of a forward pass, what LayerRoutes.instead_of counted."""

    @property
    def num_routings(self) -> Tensor:
        """Recorded choices (int64 scalar): tokens times layers times experts per token."""
        return self.is_recorded_T.sum() * self.experts_TLK[0].numel()

    def of_layer(self, index: int) -> LayerRoutes:
        """Args: index: among the layers with experts."""
        return LayerRoutes(self.experts_TLK[:, index], self.is_recorded_T)
