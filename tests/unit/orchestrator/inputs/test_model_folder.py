"""Locks: the character tokenizer's table, that every reader agrees on it, and what the model folder holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cases.largest_file import largest_file

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import DType, Init, ModelConfig
from slipstream.orchestrator.inputs.character_tokenizer import ALPHABET, SPECIAL_TOKENS, save_character_tokenizer
from slipstream.orchestrator.inputs.model_folder import complete_export, prepare_model
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.text.messages import Chat

TINY = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}


def tiny(**changes: object) -> ModelConfig:
    parts: dict = {"init": Init.random, "hf_config": dict(TINY), "tokenizer": "characters", "dtype": DType.float32}
    return ModelConfig(**(parts | changes))


def test_character_table_is_fixed(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, vocab_size=64)
    encoder = TextEncoder(tmp_path)
    assert encoder.encode("a z09\n=") == [1, 5, 4, 30, 31, 40, 41, 42]
    assert encoder.encode("a", add_special_tokens=False) == [5]
    assert encoder.encode("Z", add_special_tokens=False) == [SPECIAL_TOKENS.index("<unk>")]


def test_every_character_of_a_full_vocabulary_survives_a_round_trip(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    assert len(set(ALPHABET)) == len(ALPHABET) == 97  # printable ASCII is 95, newline, tab
    save_character_tokenizer(tmp_path, vocab_size=101)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(ALPHABET, add_special_tokens=False).ids
    assert ids == list(range(4, 101))
    assert tokenizer.decode(ids, skip_special_tokens=True) == ALPHABET


def test_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_character_tokenizer(tmp_path, vocab_size=64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "k 3 a ="
    assert theirs(text)["input_ids"] == TextEncoder(tmp_path).encode(text)
    assert theirs.decode([*TextEncoder(tmp_path).encode(text), 2], skip_special_tokens=True) == text
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)


def test_chat_messages_have_a_template(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_character_tokenizer(tmp_path, vocab_size=64)
    encoder = TextEncoder(tmp_path)
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    assert encoder.render(Chat(turns[:1]), is_open=True) == "<bos>user: 2 + 2?\nassistant: "
    whole = encoder.render(Chat(turns), is_open=False)
    assert whole == "<bos>user: 2 + 2?\nassistant: 4<eos>\n"
    ids, _ = encoder.encode_with_places(whole, add_special_tokens=False)
    assert (ids[0], ids[-2]) == (1, 2)
    assert SPECIAL_TOKENS.index("<unk>") not in ids


def test_model_folder_is_what_engine_and_trainer_both_read(tmp_path: Path) -> None:
    model = prepare_model(tiny(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == model.hf_config
    assert (config["dtype"], config["eos_token_id"], config["architectures"]) == ("float32", 2, ["Qwen3ForCausalLM"])
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    assert not list(tmp_path.glob("*.safetensors"))


def test_checkpoint_folder_lends_its_config_and_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_character_tokenizer(source, vocab_size=64)
    (source / "config.json").write_text(json.dumps(TINY | {"eos_token_id": 2}))
    config = ModelConfig(path=str(source), init=Init.random, hf_config={"hidden_size": 32})
    model = prepare_model(config, tmp_path / "model")
    assert model.hf_config["hidden_size"] == 32
    assert TextEncoder(tmp_path / "model").encode("a") == [1, 5]


def test_an_exported_model_has_its_tokenizer(tmp_path: Path) -> None:
    model = prepare_model(tiny(), tmp_path / "model").folder
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text("the trainer's")
    complete_export(model, merged)
    names = {path.name for path in merged.iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert (merged / "config.json").read_text() == "the trainer's"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hf_config": {"model_type": "bert", "vocab_size": 64}}, "model_type must be one of deepseek_v3, "),
        ({"hf_config": TINY | {"vocab_size": None}}, "vocab_size must be a positive whole number"),
        ({"hf_config": TINY | {"vocab_size": 3}}, "vocab_size >= 5, got 3"),
        ({"tokenizer": None}, "model.tokenizer is required"),
        ({"tokenizer": "/nowhere"}, r"model\.tokenizer=/nowhere holds no tokenizer\.json"),
        ({"path": "/nowhere"}, "model.path=/nowhere: no such folder"),
    ],
)
def test_mistakes_name_the_option(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_model(tiny(**changes), tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_of_an_older_format_is_refused_with_the_way_to_convert_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / name).write_text("{}")
    with pytest.raises(
        ConfigError, match=rf"has {name} and no tokenizer\.json.*AutoTokenizer\.from_pretrained\(FOLDER"
    ):
        prepare_model(tiny(tokenizer=str(tmp_path / "tokens")), tmp_path / "model")


def test_a_resume_on_a_full_disk_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    tokenizer.mkdir()
    save_character_tokenizer(tokenizer, vocab_size=64)
    config = tiny(tokenizer=str(tokenizer))
    prepare_model(config, model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for num_bytes in (10, len(before["tokenizer.json"])):  # of the tokenizer; of what comes after it
        with largest_file(num_bytes), pytest.raises(OSError, match="File too large"):
            prepare_model(replace(config, hf_config={**TINY, "architectures": ["Qwen3ForCausalLM" * 999]}), model)
        assert {path.name: path.read_bytes() for path in model.iterdir()} == before
