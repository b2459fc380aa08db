"""Promise of trainer/adapter_io.py: PEFT and transformers load what is saved, and compute our logits with
it."""

import json
import os
import weakref
from typing import Any

import pytest
import torch
from cases.tiny_configs import BY_FAMILY, DEEPSEEK, DENSE, GEMMA4_MOE, GPT_OSS, MIXED, MIXTRAL, MOE, QWEN3_5_MOE
from cases.tiny_models import hf_logits, hf_model, logits_of, make_decoder, packed, relative_error, trainer_config
from safetensors.torch import load_file

import slipstream.trainer.adapter_io as adapter_io
from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import ATTENTION_MODULES, LoraConfig, MlaNormEps, TrainMode
from slipstream.trainer.adapter_io import load_adapter, save_adapter, save_merged
from slipstream.trainer.errors import CheckpointError

TIED = {**DENSE, "tie_word_embeddings": True}
FAMILIES = BY_FAMILY | {"qwen3": TIED}


def peft_logits(hf_config, folder, batch):
    """Logits of transformers plus PEFT with the saved adapter."""
    from peft import PeftModel

    return hf_logits(PeftModel.from_pretrained(hf_model(hf_config), folder).eval(), batch)


RANKS = LoraConfig(rank=4, alpha=8.0, attention_rank=6, expert_rank=2)


def test_a_rank_of_its_own_for_attention_and_experts_changes_no_scale(tmp_path):
    decoder, batch = make_decoder(DEEPSEEK, trainer_config(lora=RANKS), mla_norm_eps=MlaNormEps.hf), packed()
    save_adapter(decoder, tmp_path)
    shapes = {name: tuple(t.shape) for name, t in load_file(tmp_path / adapter_io.ADAPTER_FILE).items()}
    layer = "base_model.model.model.layers.1."
    assert shapes[layer + "self_attn.kv_b_proj.lora_A.weight"] == (6, 16)
    assert shapes[layer + "mlp.shared_experts.down_proj.lora_B.weight"] == (64, 4)
    assert shapes[layer + "mlp.experts.lora_A.weight"] == (8 * 2, 24)
    assert relative_error(logits_of(decoder, batch), peft_logits(DEEPSEEK, tmp_path, batch)) < 1e-5
    other = make_decoder(DEEPSEEK, trainer_config(lora=RANKS), nonzero_b=False)
    load_adapter(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), other.parameters(), strict=True))
    with pytest.raises(
        CheckpointError, match=r"set \S*rank=4 \S*attention_rank=6 \S*expert_rank=2 \S*alpha=8, got rank"
    ):
        load_adapter(make_decoder(DEEPSEEK), tmp_path)


MODULES = {
    "dense": (DENSE, ("q_proj", "v_proj", "down_proj")),
    "moe": (MOE, ("o_proj", "experts")),
    "latent": (DEEPSEEK, ("kv_b_proj", "up_proj")),
}


@pytest.mark.parametrize(("hf_config", "targets"), MODULES.values(), ids=MODULES)
def test_modules_are_adapted_by_their_names_as_peft_has_them(hf_config, targets, tmp_path):
    """In an adapter's file, and merged."""
    from transformers import AutoModelForCausalLM

    trainer = trainer_config(lora=LoraConfig(rank=4, alpha=8.0, targets=targets))
    decoder, batch = make_decoder(hf_config, trainer, mla_norm_eps=MlaNormEps.hf), packed()
    adapted = {name.split(".")[-2] for name, _ in decoder.named_parameters() if name.endswith("lora_A")}
    assert adapted == {*targets}
    logits = logits_of(decoder, batch)
    save_adapter(decoder, tmp_path / "adapter")
    assert relative_error(logits, peft_logits(hf_config, tmp_path / "adapter", batch)) < 1e-5
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {*fields["target_modules"]} <= {*targets}
    other = make_decoder(hf_config, trainer, nonzero_b=False)
    assert load_adapter(other, tmp_path / "adapter") == 0
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), other.parameters(), strict=True))
    save_merged(decoder, tmp_path / "merged", hf_config)
    auto: Any = AutoModelForCausalLM
    merged = auto.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert relative_error(logits, hf_logits(merged, batch)) < 1e-5


def test_names_of_modules_are_those_of_all_attentions():
    shapes = [
        shape.name for config in FAMILIES.values() for one in read_config(config).attentions for shape in one.linears(8)
    ]
    assert {*shapes} == {*ATTENTION_MODULES}


@pytest.mark.parametrize("hf_config", [MIXED, MIXTRAL, QWEN3_5_MOE, GPT_OSS, GEMMA4_MOE], ids=lambda c: c["model_type"])
def test_a_saved_adapter_loads_back_bit_for_bit_and_means_the_same_to_peft(hf_config, tmp_path):
    trainer = trainer_config(lora=RANKS)
    decoder, batch = make_decoder(hf_config, trainer), packed()
    save_adapter(decoder, tmp_path)
    assert relative_error(logits_of(decoder, batch), peft_logits(hf_config, tmp_path, batch)) < 1e-5
    other = make_decoder(hf_config, trainer, nonzero_b=False)
    load_adapter(other, tmp_path)
    mine, theirs = dict(decoder.named_parameters()), dict(other.named_parameters())
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_others_may_read_what_is_saved_as_the_umask_says(tmp_path):
    decoder = make_decoder(DENSE)
    for umask, mode in ((0o022, 0o644), (0o027, 0o640)):
        folder, before = tmp_path / str(umask), os.umask(umask)
        try:
            save_adapter(decoder, folder / "adapter")
            save_merged(decoder, folder / "merged", DENSE)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {mode}


def test_what_does_not_fit_is_refused(tmp_path):
    """Adapters by what they need (test_stored_adapter.py has all reasons)."""
    save_adapter(make_decoder(MOE), tmp_path)
    with pytest.raises(CheckpointError, match="belongs to no weight of the model"):
        load_adapter(make_decoder(MIXED), tmp_path)
    with pytest.raises(CheckpointError, match="holds no adapter"):
        load_adapter(make_decoder(MOE), tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no adapters to save"):
        save_adapter(make_decoder(MOE, trainer_config(TrainMode.full)), tmp_path)


@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
@pytest.mark.parametrize("hf_config", FAMILIES.values(), ids=FAMILIES)
def test_transformers_reproduces_our_logits_from_the_merged_model(hf_config, mode, tmp_path):
    from transformers import AutoModelForCausalLM

    decoder, batch = make_decoder(hf_config, trainer_config(mode), mla_norm_eps=MlaNormEps.hf), packed()
    save_merged(decoder, tmp_path, hf_config)
    auto: Any = AutoModelForCausalLM  # what it declares is without output_loading_info
    model, info = auto.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert relative_error(logits_of(decoder, batch), hf_logits(model.eval(), batch)) < 1e-5


def test_a_merged_model_has_the_checkpoints_tensors_in_their_formats(tmp_path):
    """A correction bias stays float32."""
    decoder = make_decoder(DEEPSEEK, dtype=torch.bfloat16)
    (tmp_path / adapter_io.INDEX_NAME).write_text("of a larger model that was here")
    save_merged(decoder, tmp_path, DEEPSEEK)
    assert not (tmp_path / adapter_io.INDEX_NAME).exists()
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        meta.name: meta.shape for meta in decoder.spec.checkpoint_tensors("bfloat16")
    }
    wide = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    assert {name: t.dtype for name, t in tensors.items()} == {
        name: torch.float32 if name in wide else torch.bfloat16 for name in tensors
    }
    for name in wide:
        assert torch.equal(tensors[name], decoder.get_parameter(name)), name
        assert not torch.equal(tensors[name], tensors[name].bfloat16().float()), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["DeepseekV3ForCausalLM"], "bfloat16")


def test_a_large_model_is_cut_into_files_with_an_index(tmp_path, monkeypatch):
    from slipstream.trainer.weights.loading import CheckpointReader, load_weights

    merge, merged, num_bytes = adapter_io._merged, [], []

    def watched(*args):
        merged.append(weakref.ref(tensor := merge(*args)))
        num_bytes.append(sum(one.nbytes for held in merged if (one := held()) is not None))
        return tensor

    monkeypatch.setattr(adapter_io, "MAX_FILE_BYTES", 1 << 16)
    monkeypatch.setattr(adapter_io, "_merged", watched)
    decoder = make_decoder(MOE, trainer_config(TrainMode.full))
    save_merged(decoder, tmp_path, MOE)
    assert not (tmp_path / "model.safetensors").exists()
    files = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert max(num_bytes) <= max(file.stat().st_size for file in files), "more than one file is in host memory"
    place_of = json.loads((tmp_path / adapter_io.INDEX_NAME).read_text())["weight_map"]
    assert place_of == {name: file.name for file in files for name in load_file(file)}
    other = make_decoder(MOE, trainer_config(TrainMode.full))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(torch.nan)
    report = load_weights(other, CheckpointReader(tmp_path, other.spec), seed=0)
    assert report.ignored == ()
    for (name, mine), theirs in zip(decoder.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
