"""Oracle: vLLM with a tokenizer, and transformers' generate, end responses at no token that rollout.text.ends lacks."""

import json
from pathlib import Path

import pytest
from fakes.checkpoints import CONFIGS
from fakes.template_tokenizer import QWEN, save_template_tokenizer
from transformers import AutoTokenizer, GenerationConfig

from slipstream.rollout.text.ends import end_token_ids


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 0}, {"eos_token_id": [0, 7]}])
@pytest.mark.parametrize("config", [{}, {"eos_token_id": 0}, {"eos_token_id": [5, 6]}])
def test_the_ends_are_those_of_vllm_with_a_tokenizer_and_of_transformers(tmp_path: Path, generation, config):
    from vllm import SamplingParams
    from vllm.transformers_utils.config import try_get_generation_config

    save_template_tokenizer(tmp_path, "qwen3", QWEN)
    known = {key: value for key, value in CONFIGS["qwen3"].items() if key != "eos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(known | {"vocab_size": 700} | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    theirs = try_get_generation_config(str(tmp_path), trust_remote_code=False)
    assert theirs is not None
    params = SamplingParams()
    params.update_from_generation_config(theirs.to_diff_dict(), tokenizer.eos_token_id)
    of_transformers = GenerationConfig.from_pretrained(tmp_path).eos_token_id if generation else None
    named = [of_transformers] if isinstance(of_transformers, int) else of_transformers or []
    ends = set(end_token_ids(tmp_path))
    assert params.all_stop_token_ids | set(named) <= ends
    in_config = config.get("eos_token_id", [])
    assert ends - params.all_stop_token_ids <= set([in_config] if isinstance(in_config, int) else in_config)
