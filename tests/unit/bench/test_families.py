"""Rows of bench/families.py are runs that nothing refuses before they start: most of them have a GPU to wait for."""

import json
from pathlib import Path

import pytest

from bench import families
from slipstream.conf.architecture.families import kind_of, read_config
from slipstream.conf.checks.model import check_architecture
from slipstream.conf.load import load_run_config
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config

WORDS = {
    **{name: families.words_of(name, True) for name in families.FAMILIES},
    **{f"{name}, own widths": families.own_words(name) for name in families.OWN},
}


@pytest.mark.parametrize("row", WORDS)
def test_a_row_is_a_run_of_its_family(row: str) -> None:
    config = load_run_config(WORDS[row])
    hf_config = resolve_hf_config(config.model)
    check_architecture(config, hf_config)
    assert kind_of(hf_config) == row.partition(",")[0].partition(" ")[0]
    assert read_config(hf_config).num_layers == hf_config["num_hidden_layers"] < 10


def test_responses_to_long_prompts_pass_the_number_of_keys_that_an_indexer_chooses(tmp_path: Path) -> None:
    """Their first 64 tokens do not: a range of positions of its own in parity/k3_from_*."""
    config = load_run_config(families.with_prompts(families.own_words("deepseek_v32 beyond index_topk"), tmp_path))
    assert config.data.path is not None
    prompts = [json.loads(line)["prompt"] for line in Path(config.data.path).read_text().splitlines()]
    chosen = resolve_hf_config(config.model)["index_topk"]
    assert {len(prompt) for prompt in prompts} == {chosen - 64}
    assert chosen + 1024 < chosen - 64 + config.rollout.sampling.max_tokens <= config.rollout.max_model_len


def test_positions_that_no_step_had_have_no_k3() -> None:
    rows = [{"step": 0, "parity/k3_from_0": None}, {"parity/k3_from_0": 1.0, "parity/k3_from_64": None}]
    assert families.k3_by_position([*rows, {"parity/k3_from_0": 3.0}]) == {"parity/k3_from_0": 2.0}
