"""Rows that have changed since a run began are refused once they are read, before the run's processes start."""

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import checkpoints_of
from slipstream.orchestrator.cluster import placement
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import RunLog
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.orchestrator.inputs.rows.prompt_rows import RowEncoder
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.orchestrator.training import Ray, finetune, reinforce
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.messages import Chat


class StartedAtAll(Exception):
    """Processes of the run would start."""


@pytest.mark.parametrize(("experiment", "train"), [("quickstart", reinforce), ("sft_quickstart", finetune)])
def test_rows_that_have_changed_end_a_resume_before_processes_start(
    experiment: str, train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "Cluster", Mock(side_effect=StartedAtAll))
    rows, folder = tmp_path / "rows.jsonl", RunFolder(tmp_path / "run")
    rows.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    words = [f"experiment={experiment}", "data=files", f"data.path={rows}", "data.eval_path=null", "run.resume=run"]
    config = load_run_config(words)

    def resume(config: RunConfig) -> None:
        with RunLog(folder.log) as log:
            asyncio.run(train(config, folder, log, Ray(None, None)))

    store = checkpoints_of(config, folder)
    cursor: dict[str, Any] = {"epoch": 0, "position": 0, "digest": "of other rows", "seed": 0, "shuffle": True}
    store.finish(store.begin(3), RunState(3, 3, cursor, {}, BufferState()))
    with pytest.raises(DataError, match="prompt cursor belongs to other rows"):
        resume(config)


@pytest.mark.parametrize(
    ("name", "date"), [("mine-20250102-030405", "2 Jan"), ("mine-20250102-030405-2", "2 Jan"), ("renamed", "today")]
)
def test_rows_of_a_resume_have_the_date_of_the_run_that_it_goes_on_with(name: str, date: str, tmp_path: Path) -> None:
    """As many chat templates ask for it: else a resume on another day would be one with other rows."""
    template = "{{ strftime_now('%-d %b') }}{{ messages[0].content }}"
    tokenizer, run = tmp_path / "tokenizer", tmp_path / name
    tokenizer.mkdir()
    save_character_tokenizer(tokenizer, vocab_size=96)
    described = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))
    words = ["experiment=quickstart", f"model.tokenizer={tokenizer}", "model.hf_config.vocab_size=96"]
    rows = RowEncoder(load_run_config([*words, f"run.resume={run}"]))
    config = load_run_config(words).model
    of_run = TextEncoder(prepare_model(config, tmp_path / "model", RunFolder(run).began).folder)
    chat = Chat([{"role": "user", "content": "!"}])
    said = {one.render(chat, is_open=True) for one in (rows.exact, of_run)}
    assert said == {f"{datetime.now():%-d %b}!" if date == "today" else f"{date}!"}
