"""The state of a run that has made some steps, and checkpoints of it."""

from pathlib import Path

import numpy as np

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint
from slipstream.rollout.types import Group, Prompt, Rollout


def make_state(step: int = 7) -> RunState:
    prompt = Prompt(3, (1, 2), "k =", {"answer": "k", "level": 2})
    rollouts = [Rollout([5, 2], [-0.1, -1.0 / 3.0], [6, 7], "a", "stop"), Rollout([5], [-0.3], [6], "", "length")]
    return RunState(
        step=step,
        policy_version=step - 1,
        prompts={"epoch": 1, "position": 9},
        shuffle_rng=dict(np.random.default_rng(5).bit_generator.state),
        buffer=BufferState(
            step, {30: Group(prompt, rollouts, [0.1 + 0.2, None], [{"math": 0.3}, {"math": None}])}, {31: prompt}
        ),
    )


def make_store(folder: Path, config: RunConfig | None = None, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep=keep, options=fingerprint(config or RunConfig()))


def write(store: CheckpointStore, step: int = 7) -> Path:
    partial = store.begin(step)
    (partial / "trainer" / "rank0.bin").write_bytes(bytes(range(256)) * 40)
    return store.finish(partial, make_state(step))
