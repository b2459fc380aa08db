"""Locks: a controller that goes on from what another one wrote down in a step uses every prompt once, and writes
every row once.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from fakes.loop import Loop, make_config

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.checkpoints.journal import Journal, Whereabouts, read_journal, write_journal
from slipstream.orchestrator.checkpoints.loop_state import RunState


def config_of(staleness: int) -> RunConfig:
    run = {"checkpoint_every_steps": 0, "samples_per_step": 100}
    return make_config(num_steps=6, staleness=staleness, run=run)


def steps_of_prompts(folder: Path) -> dict[str, set[int]]:
    """The steps that trained on each prompt."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for row in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()):
        if row["step"] > 0 and not row.get("eval"):
            found[row["prompt"]].add(row["step"])
    return {prompt: steps for prompt, steps in found.items() if prompt.startswith("prompt ")}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("killed_in", [1, 4, 6])
async def test_every_prompt_is_used_once_and_every_row_written_once(
    tmp_path: Path, staleness: int, killed_in: int
) -> None:
    states: list[RunState] = []
    loop = Loop(tmp_path, config_of(staleness))
    loop.folder.journal.parent.mkdir()

    async def note(state: RunState) -> None:
        if states:
            assert newest() == loop.rows[-1]["step"], "the step under way has its row"
        write_journal(loop.folder, Journal(Whereabouts("", 0), "", state))
        assert newest() == len(loop.rows) - 1 == max(0, state.step - 1), "and before, the one before it counts"
        states.append(state)

    def newest() -> int:
        journal = read_journal(loop.folder)
        assert journal is not None
        return journal.state.step

    loop.hold = note
    await loop.run()
    assert [state.step for state in states] == list(range(6))

    found = states[killed_in - 1]
    another = Loop(tmp_path, config_of(staleness), resume_step=found.step)
    another.found, another.world.version = found, found.policy_version
    controller = await another.run()
    assert (controller.step, controller.policy_version) == (6, 6)
    assert another.world.diary[0] == ("publish", found.policy_version), "whatever engines hold"
    assert [row["step"] for row in another.rows] == list(range(7))
    used = steps_of_prompts(tmp_path)
    assert sorted(used) == sorted(f"prompt {number}" for number in range(18))
    assert {len(steps) for steps in used.values()} == {1}
    assert another.controller is not None and another.controller.buffer.state().num_batches == 6
