"""RankStates: what a trainer rank saves and continues from, on disk and in memory.

    on disk:   begin_checkpoint -> has_written    load_state    save_*
    in memory: keep_states -> keep    settle, when a rank has died -> load_kept

Owns which tensors of a rank a state has, their copies on the host, and when these may be taken anew. Does not own their
files and the sending (checkpoint/), a step's folder (orchestrator/checkpoints), or who keeps whose states
(orchestrator/cluster/rebirth.py).
Invariant: a state is of a whole number of updates, and all ranks restore the same one, or none.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Init, TrainMode
from slipstream.trainer.adapter_io import gather_adapter, save_adapter, save_merged
from slipstream.trainer.checkpoint.background import BackgroundWrites, HostCopies
from slipstream.trainer.checkpoint.keeper import Address, Readiness, take
from slipstream.trainer.checkpoint.kept_states import KeptStates
from slipstream.trainer.checkpoint.rank_state import (
    State,
    read_rank_state,
    read_rank_state_parts,
    state_layout,
    write_rank_state,
)
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.process_group import ControlGroup
from slipstream.trainer.step.learner import Learner
from slipstream.trainer.types import TrainerOptions


class RankStates:
    """The states of one loaded rank. Methods, has_written and settle aside, are collective over the trainer's ranks."""

    def __init__(self, options: TrainerOptions, decoder: Decoder, learner: Learner, control: ControlGroup) -> None:
        self._options, self._decoder, self._learner, self._control = options, decoder, learner, control
        self._rank, self._device = decoder.layout.rank, decoder.layout.device
        self._writes, self._copies = BackgroundWrites(), HostCopies(self._device)
        self._kept = KeptStates(self._rank, options.sync_key, self._device)
        self.num_bytes = num_bytes = sum(tensor.nbytes for tensor in learner.state_tensors().values())
        if self._rank == 0 and options.trainer.mode is TrainMode.lora:
            num_bytes += options.trainer.num_ranks * learner.num_bytes  # the whole adapter
        self._writes.begin(partial(self._copies.prepare, num_bytes))

    def save_adapter(self, folder: str | Path) -> None:
        save_adapter(self._decoder, folder, self._base_path)

    def save_merged(self, folder: str | Path) -> None:
        save_merged(self._decoder, folder, self._options.hf_config)

    def begin_checkpoint(self, folder: str | Path, adapter: str | Path | None = None) -> None:
        """Copy to the host what an exact resume needs, and begin to write it: every rank its own file. The next step
        may follow at once; has_written() says when the files are there.

        Args:
            adapter: Where rank 0 begins to write the adapter in PEFT's format, too.
        """
        learner = self._learner
        self._control.agree("folder and policy version", [str(folder), learner.policy_version])
        self._writes.finish()  # the memory for copies is prepared, and nothing is written from it any more
        self._copies.begin()
        copied = {name: self._copies.copy(tensor) for name, tensor in learner.state_tensors().items()}
        gathered = None if adapter is None else gather_adapter(self._decoder, self._base_path, self._copies.copy)
        self._copies.wait()
        layout, progress = self._state_layout, learner.progress
        self._writes.begin(partial(write_rank_state, Path(folder), self._rank, copied, layout, progress))
        if adapter is not None and gathered is not None:
            self._writes.begin(partial(gathered.write, adapter))

    def has_written(self) -> bool:
        """Whether begin_checkpoint() has written this rank's files. Raises why one could not be written, once."""
        return self._writes.are_done()

    def load_state(self, folder: str | Path) -> None:
        """Continue exactly from what begin_checkpoint() wrote. If a rank's state does not fit, no rank changes its own.

        Raises:
            CheckpointError: this rank's files are missing, or of another layout.
            TrainerError: another rank could not read its files, or the ranks' files have different versions.
        """
        self._restore(f"state in {folder}", partial(read_rank_state, Path(folder)))

    def keep_states(self, keepers: Sequence[Address], life: int) -> None:
        """From now on keep() sends to these. `life`: how often all ranks were started again."""
        self._kept.use(keepers, self.num_bytes, life)

    def keep(self, number: int) -> Readiness:
        """Copy this rank's state and begin to send it to its keepers, if every rank's earlier states have arrived.
        The next call may follow at once.

        Args:
            number: the same on every rank, and larger than those before.

        Returns:
            The readiness of the least ready rank; now: all states are on their way.
        """
        mine = self._kept.readiness()
        if self._control.sum(mine is Readiness.never):
            return Readiness.never
        if self._control.sum(mine is Readiness.later):
            return Readiness.later
        self._kept.begin(number, self._learner.state_tensors(), self._state_layout, self._learner.progress)
        return Readiness.now

    def settle(self) -> int | None:
        """Drop gradients, and wait for what is being written or sent: who asked for it is gone. Not collective.

        Returns:
            The policy version of the state that is left; None: a step's updates have begun, and have not ended.
        """
        self._learner.drop_gradients()
        self._writes.settle()
        self._kept.settle()
        return None if self._learner.is_in_a_step else self._learner.policy_version

    def load_kept(self, keeper: Address, number: int, taken: memoryview | None = None) -> None:
        """Continue from a state that keep() sent.

        Args:
            taken: The state, if it is here already.

        Raises:
            OSError: The keeper does not give it.
            TrainerError: As load_state() does.
        """
        data = take(keeper, self._options.sync_key, self._rank, number) if taken is None else taken
        self._restore("state in memory", partial(read_rank_state_parts, data))

    def _restore(self, what: str, read: Callable[[int, JsonObject, dict[str, list[int]]], State]) -> None:
        learner = self._learner
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
