"""Locks: an adapter that PEFT wrote computes here what it computes in PEFT, and what we write of it does so there; one
that would compute something else is refused by the name of the field or of the tensor.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from cases.tiny_configs import BY_FAMILY, DENSE, LLAMA, MOE, QWEN2_MOE
from cases.tiny_models import hf_logits, hf_model, logits_of, make_decoder, packed, relative_error, trainer_config
from safetensors.torch import load_file, save_file

from slipstream.conf.architecture.families import read_config
from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import LORA_TARGETS, LoraConfig
from slipstream.trainer.adapter_io import load_adapter, save_adapter
from slipstream.trainer.weights.stored_adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    NEUTRAL,
    READ,
    StoredAdapter,
    check_adapter_fits,
    factor_shapes,
    options_of,
    read_stored_adapter,
)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UNEVEN = LoraConfig(rank=4, alpha=8.0, attention_rank=6, expert_rank=2)


def write_adapter(hf_config: dict[str, Any], folder: Path, **fields: Any) -> None:
    """PEFT's own, with a B that does something."""
    fields = {"r": 6, "lora_alpha": 16, "task_type": "CAUSAL_LM", "target_modules": ALL} | fields
    model = peft.get_peft_model(hf_model(hf_config), peft.LoraConfig(**fields))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(str(folder))


def change_config(folder: Path, **fields: Any) -> None:
    """Other fields in adapter_config.json; None where the value is ... ."""
    path = folder / ADAPTER_CONFIG
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def options(folder: Path) -> LoraConfig:
    """Those of a run that fits the adapter."""
    return LoraConfig(**options_of(read_stored_adapter(folder, "--adapter"), "--adapter")._asdict())


def peft_logits(hf_config: dict[str, Any], folder: Path) -> torch.Tensor:
    return hf_logits(peft.PeftModel.from_pretrained(hf_model(hf_config), str(folder)).eval(), packed())


TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "plain": (LLAMA, {}, 0),
    "rslora": (LLAMA, {"use_rslora": True}, 0),
    "q and v": (LLAMA, {"target_modules": ["q_proj", "v_proj"]}, 10),
    "q and v, rslora": (LLAMA, {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}, 10),
    "half of the layers": (LLAMA, {"layers_to_transform": [1]}, 7),
    "without one layer's": (LLAMA, {"exclude_modules": ["layers.0.self_attn.q_proj"]}, 1),
    "an expression": (LLAMA, {"target_modules": r".*\.1\.mlp\.(up|down)_proj"}, 12),
    "other ranks in attention": (
        LLAMA, {"rank_pattern": {r"self_attn\.\w+": 3}, "alpha_pattern": {"[qkvo]_proj": 8}}, 0,
    ),
    "alternatives of a pattern": (
        LLAMA, {"rank_pattern": {"q_proj|k_proj|v_proj|o_proj": 3}, "alpha_pattern": {"k|[qvo]_proj|k_proj": 8}}, 0,
    ),
    "the same ranks, by patterns": (LLAMA, {"r": 8, "rank_pattern": {".*": 4}, "lora_alpha": 8}, 0),
    "patterns with rslora": (
        LLAMA, {"use_rslora": True, "r": 4, "rank_pattern": {"self_.*": 16}, "alpha_pattern": {"self_.*": 32}}, 0,
    ),
    "dropout": (LLAMA, {"lora_dropout": 0.3}, 0),
    "fan in, fan out": (LLAMA, {"fan_in_fan_out": True}, 0),
    "gaussian": (LLAMA, {"init_lora_weights": "gaussian"}, 0),
    "Gaussian": (LLAMA, {"init_lora_weights": "Gaussian"}, 0),
    "orthogonal": (LLAMA, {"init_lora_weights": "orthogonal"}, 0),
    "mica": (LLAMA, {"init_lora_weights": "mica"}, 0),
    "experts alone": (
        MOE, {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, 8,
    ),
    "half of the experts": (
        MOE, {"target_modules": ["q_proj"], "target_parameters": ["0.mlp.experts.down_proj"], "use_rslora": True}, 9,
    ),
}  # fmt: skip
"""What PEFT is asked for -> matrices of the model that are left without factors."""


@pytest.mark.parametrize(("hf_config", "fields", "num_missing"), TAKEN.values(), ids=TAKEN)
def test_an_adapter_of_pefts_computes_what_it_computes_there(
    hf_config: dict[str, Any], fields: dict[str, Any], num_missing: int, tmp_path: Path
) -> None:
    write_adapter(hf_config, tmp_path / "peft", **fields)
    expected = peft_logits(hf_config, tmp_path / "peft")
    decoder = make_decoder(hf_config, trainer_config(lora=options(tmp_path / "peft")), nonzero_b=False)
    base = logits_of(decoder, packed())
    assert load_adapter(decoder, tmp_path / "peft") == num_missing
    assert relative_error(logits_of(decoder, packed()), expected) < 1e-5 < 1e-2 < relative_error(base, expected)
    save_adapter(decoder, tmp_path / "ours")
    assert relative_error(peft_logits(hf_config, tmp_path / "ours"), expected) < 1e-5


def test_files_of_peft_before_patterns_are_taken(tmp_path: Path) -> None:
    write_adapter(LLAMA, tmp_path)
    expected = peft_logits(LLAMA, tmp_path)
    kept = {"base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_alpha"}
    kept |= {"lora_dropout", "modules_to_save", "peft_type", "r", "target_modules", "task_type"}
    fields = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    change_config(tmp_path, **dict.fromkeys(set(fields) - kept, ...), merge_weights=False)
    decoder = make_decoder(LLAMA, trainer_config(lora=options(tmp_path)), nonzero_b=False)
    load_adapter(decoder, tmp_path)
    assert relative_error(logits_of(decoder, packed()), expected) < 1e-5


WITHOUT = [
    LoraConfig(rank=4, alpha=8.0, targets=tuple(one for one in LORA_TARGETS if one != kind)) for kind in LORA_TARGETS
]


@pytest.mark.parametrize(
    ("hf_config", "lora"),
    [
        *((one, lora) for one in (*BY_FAMILY.values(), MOE) for lora in (LoraConfig(rank=4, alpha=8.0), UNEVEN)),
        *((QWEN2_MOE, lora) for lora in WITHOUT),
    ],
    ids=lambda one: one["model_type"] if isinstance(one, dict) else "",
)
def test_factors_are_those_that_the_trainer_writes(hf_config: dict[str, Any], lora: LoraConfig, tmp_path: Path) -> None:
    save_adapter(make_decoder(hf_config, trainer_config(lora=lora), nonzero_b=False), tmp_path)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / ADAPTER_FILE).items()}
    assert written == factor_shapes(read_config(hf_config), lora)
    assert (
        check_adapter_fits(read_stored_adapter(tmp_path, "--adapter"), read_config(hf_config), lora, "--adapter") == 0
    )


CHANGES_THE_FUNCTION = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 3},
    "bias": "lora_only",
    "kasa_config": {"beta": 1e-4},
    "layer_replication": [[0, 1]],
    "lora_bias": True,
    "megatron_config": {"tensor_model_parallel_size": 1},
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"num_samples": 8},
    "trainable_token_indices": [5],
    "use_bdlora": {"nblocks": 2},
    "use_dora": True,
    "use_qalora": True,
    "velora_config": {"num_groups": 64},
    "a_field_of_a_later_peft": 1,
}


def test_every_field_of_peft_is_read_known_to_be_neutral_or_refused() -> None:
    """A field that a later PEFT adds is refused, and this test wants it looked at."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields - READ - NEUTRAL == set(CHANGES_THE_FUNCTION) - {"a_field_of_a_later_peft"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(LLAMA, folder)
    return folder


def copied(plain: Path, folder: Path, **fields: Any) -> Path:
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change_config(folder, **fields)
    return folder


def refusal(folder: Path, lora: LoraConfig | None = None, hf_config: dict[str, Any] = LLAMA) -> str:
    with pytest.raises(ConfigError) as caught:
        stored = read_stored_adapter(folder, "--adapter")
        check_adapter_fits(stored, read_config(hf_config), lora or options(folder), "--adapter")
    message = str(caught.value)
    assert message.startswith(f"--adapter={folder}") and "\n" not in message
    return message


@pytest.mark.parametrize(("field", "value"), [*CHANGES_THE_FUNCTION.items(), ("of_a_later_release", "none")])
def test_a_field_that_changes_the_function_is_refused_by_name(
    field: str, value: Any, plain: Path, tmp_path: Path
) -> None:
    message = refusal(copied(plain, tmp_path, **{field: value}))
    assert f" has {field}={json.dumps(value)}" in message and "merge it into its base with PEFT" in message


def test_neutral_fields_are_what_peft_ignores(plain: Path, tmp_path: Path) -> None:
    values = {
        "ensure_weight_tying": True, "fan_in_fan_out": True, "lora_dropout": 0.5, "megatron_core": "else",
        "qalora_group_size": 8, "revision": "main", "exclude_modules": [], "loftq_config": {"loftq_bits": 4},
        "corda_config": {"corda_method": "kpm"}, "eva_config": {"rho": 1.0}, "lora_ga_config": {"direction": "random"},
    }  # fmt: skip
    assert set(values) <= NEUTRAL
    changed = copied(plain, tmp_path, **values)
    assert torch.equal(peft_logits(LLAMA, changed), peft_logits(LLAMA, plain))
    assert options(changed) == options(plain)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "later"])
def test_an_initialization_that_changes_the_base_is_refused(start: str, plain: Path, tmp_path: Path) -> None:
    message = refusal(copied(plain, tmp_path, init_lora_weights=start))
    assert f"has init_lora_weights='{start}'" in message and "path_initial_model_for_weight_conversion" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": ...}, "has r=None in adapter_config.json"),
        ({"r": True}, "has r=True in adapter_config.json"),
        ({"lora_alpha": 0}, "has lora_alpha=0 in adapter_config.json"),
        ({"lora_alpha": "16"}, "has lora_alpha='16' in adapter_config.json"),
        ({"lora_alpha": math.nan}, "has lora_alpha=nan in adapter_config.json"),
        ({"lora_alpha": 10**400}, "has lora_alpha=1000"),
        ({"alpha_pattern": {"q_proj": math.nan}}, "has alpha_pattern={'q_proj': nan}, which is no object of patterns"),
        ({"peft_type": "LOHA"}, "has peft_type='LOHA', and only LORA is read"),
        ({"rank_pattern": [3]}, "has rank_pattern=[3], which is no object of patterns"),
        ({"alpha_pattern": {"(": 3}}, "has alpha_pattern={'(': 3}, which is no object of patterns"),
        ({"rank_pattern": {"q_proj": 0}}, "has rank_pattern={'q_proj': 0}, which is no object of patterns"),
        ({"alpha_pattern": {"q_proj": -8}}, "has alpha_pattern={'q_proj': -8}, which is no object of patterns"),
        ({"alpha_pattern": {"q_proj": True}}, "has alpha_pattern={'q_proj': True}, which is no object of patterns"),
        ({"rank_pattern": {"q_proj": 3}}, "rank 3 in model.layers.0.self_attn.q_proj"),
        ({"alpha_pattern": {"q_proj": 3}}, 'has alpha_pattern={"q_proj": 3}: scale'),
        ({"rank_pattern": {"mlp.*": 3}}, 'has rank_pattern={"mlp.*": 3}: scale'),
    ],
)
def test_fields_that_no_option_says_are_refused(
    fields: dict[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    said = refusal(copied(plain, tmp_path, **fields))
    assert message in said or ("rank 6 in model.layers" in said and "and 3 in model" in said)


@pytest.mark.parametrize(
    ("fields", "lora", "message"),
    [
        (
            {},
            LoraConfig(rank=16, alpha=16),
            "has r=6, lora_alpha=16; set trainer.lora.rank=6 trainer.lora.alpha=16, got",
        ),
        (
            {},
            LoraConfig(rank=6, alpha=32),
            "set trainer.lora.rank=6 trainer.lora.alpha=16, got rank=6 attention_rank=null",
        ),
        (
            {},
            LoraConfig(rank=6, alpha=16, attention_rank=2),
            "set trainer.lora.rank=6 trainer.lora.alpha=16 trainer.lora.attention_rank=null, got",
        ),
        (
            {"use_rslora": True},
            LoraConfig(rank=6, alpha=16),
            "use_rslora=true (a scale of lora_alpha / sqrt(r), where a run's is alpha / rank); set trainer.lora.rank=6 "
            "trainer.lora.alpha=39.1918358845309, got",
        ),
        (
            {},
            LoraConfig(rank=6, alpha=16, targets=("attention", "experts")),
            "no place in a run without mlp in trainer.lora.targets; add it",
        ),
    ],
)
def test_options_that_do_not_fit_are_answered_with_those_that_do(
    fields: dict[str, Any], lora: LoraConfig, message: str, plain: Path, tmp_path: Path
) -> None:
    assert message in refusal(copied(plain, tmp_path, **fields), lora)


def test_a_module_is_a_target_parameter_by_whole_parts_of_its_name() -> None:
    """kv_proj.weight ends as v_proj.weight does. Patterns are held against names of parameters or of modules."""
    fields = {"r": 4, "lora_alpha": 8, "target_parameters": ["v_proj.weight"], "rank_pattern": {"kv_proj|v_proj": 2}}
    stored = StoredAdapter(Path(), fields, {})
    assert stored.rank_and_scale("model.layers.0.self_attn.kv_proj") == (2, 4.0)
    assert stored.rank_and_scale("model.layers.0.self_attn.v_proj") == (4, 2.0)
    fields["target_parameters"] = 3  # no list, and so none
    assert stored.rank_and_scale("model.layers.0.self_attn.v_proj") == (2, 4.0)


def test_alpha_may_be_typed_with_six_digits(plain: Path, tmp_path: Path) -> None:
    stored = read_stored_adapter(copied(plain, tmp_path, use_rslora=True), "--adapter")
    assert check_adapter_fits(stored, read_config(LLAMA), LoraConfig(rank=6, alpha=39.19184), "--adapter") == 0


LAYER = "base_model.model.model.layers.0."


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (
            (LAYER, "base_model.model.model.language_model.layers.0."),
            "does not begin with base_model.model.model.layers",
        ),
        ((LAYER, "model.layers.0."), "does not begin with base_model.model.model.layers."),
        ((".lora_A.weight", ".lora_A.default.weight"), "has the adapter's name in it"),
        ((LAYER + "self_attn.q_proj", "base_model.model.lm_head"), "is of the embedding or the head"),
        ((LAYER + "self_attn.q_proj", LAYER + "mlp.experts.3.up_proj"), "is of one expert"),
        ((LAYER + "self_attn.q_proj", LAYER + "self_attn.qkv_proj"), "belongs to no weight of the model"),
        ((LAYER + "self_attn.q_proj.lora_A.weight", ""), "lora_B.weight is there and"),
    ],
)
def test_a_tensor_without_a_place_is_named(renamed: tuple[str, str], message: str, plain: Path, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path)
    tensors = {name.replace(*renamed): tensor for name, tensor in load_file(plain / ADAPTER_FILE).items()}
    save_file({name: tensor for name, tensor in tensors.items() if name}, folder / ADAPTER_FILE)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DENSE, r"layers.0.mlp.experts.base_layer.lora_A.weight belongs to no weight of the model"),
        ({**MOE, "num_hidden_layers": 1}, "belongs to no weight of the model"),
        ({**MOE, "hidden_size": 96}, "has shape (32, 64), and this model and rank make it (32, 96)"),
        ({**MOE, "num_experts": 4}, "has shape (32, 64), and this model and rank make it (16, 64)"),
    ],
)
def test_the_adapter_of_another_model_is_refused(model: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_adapter(make_decoder(MOE, nonzero_b=False), tmp_path)
    assert message in refusal(tmp_path, LoraConfig(rank=4, alpha=8.0), model)


def test_other_files_are_refused(plain: Path, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path)
    cut = (folder / ADAPTER_FILE).read_bytes()[:-1]
    (folder / ADAPTER_FILE).write_bytes(cut)
    with pytest.raises(ConfigError, match="is cut short"):
        read_stored_adapter(folder, "--adapter")
    save_file({}, folder / ADAPTER_FILE)
    assert "holds no factor" in refusal(folder, LoraConfig())
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(plain / ADAPTER_FILE).items()}
    save_file(tensors, folder / ADAPTER_FILE)
    assert "has format F8_E4M3; formats that are read: F32, BF16, F16" in refusal(folder)
    (plain / "adapter_model.bin").touch()  # beside the file that is read
    read_stored_adapter(plain, "--adapter")
    (plain / "adapter_model.bin").unlink()
    (folder / ADAPTER_FILE).rename(folder / "adapter_model.bin")
    assert "adapter_model.bin, a format that can run code" in refusal(folder)
    (folder / ADAPTER_CONFIG).write_text("[" * 10_000)
    assert "holds no adapter in PEFT's format" in refusal(folder, LoraConfig())
