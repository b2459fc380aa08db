"""Options that a resumed run must have as its checkpoint has them, and others."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases.run_states import make_store, write

from slipstream.conf.schema import (
    Device,
    DType,
    EngineFormat,
    Init,
    Match,
    ModelConfig,
    Objective,
    OptimState,
    Order,
    RunConfig,
    RunSection,
    TrainMode,
)
from slipstream.orchestrator.checkpoints.manifest import write_manifest
from slipstream.orchestrator.checkpoints.run_checkpoint import fingerprint
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.errors import CheckpointError
from slipstream.orchestrator.files.run_folder import flatten


def test_other_options_are_refused_and_named_but_length_may_change(tmp_path: Path) -> None:
    path = write(make_store(tmp_path))
    longer = RunConfig(run=RunSection(num_steps=9999, eval_every_steps=1))
    assert make_store(tmp_path, longer).read(path).step == 7
    config = RunConfig()
    other = replace(config, trainer=replace(config.trainer, lora=replace(config.trainer.lora, rank=8)))
    refused = make_store(tmp_path, other)
    for attempt in (lambda: refused.read(path), lambda: refused.step_to_resume("x")):
        with pytest.raises(CheckpointError, match=r"trainer\.lora\.rank: 16 there, 8 now"):
            attempt()


@pytest.mark.parametrize("left_out", [False, True])
def test_a_checkpoint_of_another_version_goes_on_with_that_one(tmp_path: Path, left_out: bool) -> None:
    store = make_store(tmp_path)
    path = write(store)
    state = json.loads((path / "state.json").read_text())
    if left_out:
        del state["options"]["run.seed"]
    else:
        state["options"]["weight_sync.enabled"] = True
    (path / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").unlink()
    write_manifest(path)
    with pytest.raises(CheckpointError, match=r"step-000007 is of another version .*: environment\.json names"):
        store.read(path)


OTHER: dict[str, Any] = {
    "model.path": "elsewhere",
    "model.init": Init.checkpoint,
    "model.hf_config": {"model_type": "qwen3_moe", "num_experts": 8},
    "model.dtype": DType.float32,
    "trainer.numerics.match": Match.transformers,
    "model.engine_format": EngineFormat.block_fp8,
    "model.tokenizer": "elsewhere",
    "trainer.num_ranks": 2,
    "trainer.ep_size": 2,
    "trainer.mode": TrainMode.full,
    "trainer.lora.rank": 8,
    "trainer.lora.attention_rank": 8,
    "trainer.lora.expert_rank": 8,
    "trainer.lora.alpha": 16.0,
    "trainer.lora.dtype": DType.bfloat16,
    "trainer.lora.targets": ("attention", "mlp"),
    "trainer.lora.init_from": "an/adapter",
    "trainer.train_router": True,
    "trainer.optim.state": OptimState.int8,
    "cluster.device": Device.cuda,
    "algorithm.objective": Objective.sft,
    "algorithm.sequences_per_step": 32,
    "algorithm.group_size": 8,
    "algorithm.groups_per_step": 8,
    "algorithm.distill_coef": 0.5,
    "data.path": "elsewhere.jsonl",
    "data.sources": ("a", "b"),
    "data.weights": (2.0, 1.0),
    "data.columns": {"prompt": "question"},
    "data.chat_template_kwargs": {"enable_thinking": False},
    "data.stream": True,
    "data.drop_too_long": True,
    "data.order": Order.middling,
    "run.seed": 1,
    "parity.replay_routing": True,
}
"""For each option that a resume must not change, another value than in PLAIN."""
PLAIN = RunConfig(model=ModelConfig(init=Init.random, hf_config={"model_type": "qwen3_moe"}))
IN_FINGERPRINT = {
    "cluster.device": "device",
    "data.order": "data.order=middling",
    "algorithm.distill_coef": "algorithm.distill_coef > 0",
    "trainer.numerics.match": "mla_norm_eps",
}
"""Options that have another name there."""


def with_option(section: Any, name: str, value: Any) -> Any:
    """The same options but one. Rules between options are not asked: each is to be refused on its own."""
    first, _, rest = name.partition(".")
    other = copy.copy(section)
    object.__setattr__(other, first, with_option(getattr(section, first), rest, value) if rest else value)
    return other


def test_each_option_that_a_resume_must_not_change_has_a_value_here() -> None:
    listed = {re.sub(r"^(model\.hf_config)\..*", r"\1", name) for name, _ in flatten(fingerprint(PLAIN))}
    assert listed == {IN_FINGERPRINT.get(name, name) for name in OTHER}


@pytest.mark.parametrize("name", OTHER)
def test_a_resume_with_another_value_is_refused_and_named(tmp_path: Path, name: str) -> None:
    plain = with_option(PLAIN, "cluster.device", Device.cpu)
    changed = with_option(plain, name, OTHER[name])
    for saved, mine in ((plain, changed), (changed, plain)):  # either may have entries that the other lacks
        path = write(make_store(tmp_path, saved))
        assert make_store(tmp_path, saved).read(path).step == 7
        named = re.escape(IN_FINGERPRINT.get(name, name))
        with pytest.raises(CheckpointError, match=rf"\(.*{named}.*: .* there, .* now"):
            make_store(tmp_path, mine).read(path)


def test_the_device_that_is_found_is_the_one_that_is_named() -> None:
    found, named = (with_option(PLAIN, "cluster.device", one) for one in (Device.auto, resolve_device(Device.auto)))
    assert fingerprint(found) == fingerprint(named)


@pytest.mark.parametrize(
    ("name", "value"),
    [("trainer.optim.lr", 1.0), ("run.num_steps", 3), ("algorithm.clip_low", 0.1), ("algorithm.distill_coef", 0.25)],
)
def test_a_resume_may_change_what_no_file_depends_on(tmp_path: Path, name: str, value: float) -> None:
    distilled = with_option(PLAIN, "algorithm.distill_coef", 0.5)
    path = write(make_store(tmp_path, distilled))
    assert make_store(tmp_path, with_option(distilled, name, value)).read(path).step == 7
