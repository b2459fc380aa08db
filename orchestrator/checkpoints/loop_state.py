"""What a run goes on from, beside the trainer's own files, and how it is written as JSON.

Owns: `RunState`, and its lines in a checkpoint's groups.jsonl and in the journal. Does not own: when it is written, and
where (run_checkpoint.py, journal.py).
Invariant: what is read back is equal to what was written, arrays to the bit.
"""

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import msgspec
import numpy as np

from slipstream.conf.json_files import JsonObject
from slipstream.rollout.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class BufferState:
    """The rollout buffer between two steps. Example: BufferState(12, {97: Group(...)}, {98: Prompt(...)})."""

    num_batches: int = 0
    """Batches consumed."""
    groups: dict[int, Group] = field(default_factory=dict[int, Group])
    """Finished, not yet consumed, by ticket number."""
    in_flight: dict[int, Prompt] = field(default_factory=dict[int, Prompt])
    """Being sampled, by ticket number: to be sampled again."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything beside the trainer's own files that the next step depends on."""

    step: int
    """Optimizer steps done, refused ones included."""
    policy_version: int
    prompts: JsonObject
    """Cursor of the prompt stream (orchestrator.data.streams.Stream.state_dict)."""
    shuffle_rng: JsonObject
    """State of the generator that orders the minibatches of later epochs."""
    buffer: BufferState


def lines_of(state: RunState) -> tuple[JsonObject, str]:
    """A state as JSON: what is one value, and a line for each group and prompt of the buffer."""
    buffered = [{"ticket": t, **asdict(group)} for t, group in sorted(state.buffer.groups.items())]
    in_flight = [{"ticket": t, "prompt": asdict(prompt)} for t, prompt in sorted(state.buffer.in_flight.items())]
    head = {
        "step": state.step,
        "policy_version": state.policy_version,
        "prompts": state.prompts,
        "shuffle_rng": state.shuffle_rng,
        "num_batches": state.buffer.num_batches,
    }
    return head, "".join(json.dumps(row, default=_encode) + "\n" for row in [*buffered, *in_flight])


def state_of(head: JsonObject, rows: Iterable[str]) -> RunState:
    groups: dict[int, Group] = {}
    in_flight: dict[int, Prompt] = {}
    for row in map(json.loads, rows):
        ticket = row.pop("ticket")
        if "rollouts" in row:
            groups[ticket] = msgspec.convert(row, Group, dec_hook=_decode)
        else:
            in_flight[ticket] = msgspec.convert(row["prompt"], Prompt)
    return RunState(
        step=head["step"],
        policy_version=head["policy_version"],
        prompts=head["prompts"],
        shuffle_rng=head["shuffle_rng"],
        buffer=BufferState(head["num_batches"], groups, in_flight),
    )


def _encode(array: np.ndarray) -> JsonObject:
    """What JSON holds of an array; json.dumps calls this for what it does not know, which in a group are arrays."""
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": array.shape, "base64": data}


def _decode(_: type, raw: JsonObject) -> np.ndarray:
    return np.frombuffer(base64.b64decode(raw["base64"]), raw["dtype"]).reshape(raw["shape"])
