"""Rows of bench/families.py are runs that nothing refuses before they start: most of them have a GPU to wait for."""

import pytest

from bench import families
from slipstream.conf.architecture.families import kind_of, read_config
from slipstream.conf.load import load_run_config
from slipstream.conf.model_checks import check_architecture
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
