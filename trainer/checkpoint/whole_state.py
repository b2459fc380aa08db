"""The trained weights of a checkpoint, put together from every rank's file into one process.

Owns: which rows of a parameter each file has. Does not own the files (rank_state.py), nor what is made of the weights
(adapter_io.py). Full training alone: of a LoRA run each checkpoint has the adapter beside the ranks' files.
"""

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.trainer.errors import CheckpointError
from slipstream.trainer.model.build_decoder import dense_trainable, expert_trainable
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.moe.block import expert_shares


@torch.no_grad()
def load_trained(decoder: Decoder, folder: Path, num_ranks: int, ep_size: int) -> None:
    """Set what was trained; other weights stay as they are.

    Args:
        decoder: In full training, of one rank.
        num_ranks, ep_size: Of the run that wrote them.

    Raises:
        CheckpointError: A file is missing or damaged, or of another model.
    """
    try:
        with ExitStack() as stack:
            paths = [folder / f"rank-{rank}.safetensors" for rank in range(num_ranks)]
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]

            def rows(name: str, ranks: range) -> Tensor:
                return torch.cat([files[rank].get_tensor(f"{name}.value") for rank in ranks])

            for name, parameter in dense_trainable(decoder):
                _set(name, parameter, rows(name, range(num_ranks)))
            for name, parameter in expert_trainable(decoder):
                layer = int(name.removeprefix("model.layers.").partition(".")[0])
                for ep_rank, share in enumerate(expert_shares(len(parameter), ep_size, layer)):
                    own = parameter[share.start : share.stop]
                    _set(name, own, rows(name, range(ep_rank, num_ranks, ep_size)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not the whole state of {num_ranks} trainer ranks: {error}") from error


def _set(name: str, parameter: Tensor, values: Tensor) -> None:
    if values.shape != parameter.shape:
        raise CheckpointError(f"{name} has the shape {list(values.shape)} in files, {list(parameter.shape)} here")
    parameter.copy_(values)
