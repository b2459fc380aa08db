"""Promise of trainer/: adapters train as PEFT's do on transformers: every gradient, and one optimizer step."""

import pytest
import torch
from cases.tiny_configs import BY_FAMILY
from cases.tiny_models import (
    AS_TRANSFORMERS,
    hf_logits,
    hf_model,
    logits_of,
    make_decoder,
    packed,
    probe_loss,
    relative_error,
    trainer_config,
)
from torch import Tensor, nn

from slipstream.conf.schema import MlaNormEps, OptimConfig
from slipstream.trainer.adapter_io import PREFIX, load_adapter, pack_expert_a, pack_expert_b, save_adapter
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.step.learner import Learner
from slipstream.trainer.weights.fused_experts import interleave

MODELS = BY_FAMILY | {
    "qwen3_next": {
        **BY_FAMILY["qwen3_next"],
        "num_experts_per_tok": 8,
    },  # another route in bfloat16 would hide the rest
    "qwen3_5_moe": {**BY_FAMILY["qwen3_5_moe"], "num_experts_per_tok": 6},
}
LR = 0.01


def peft_model(hf_config, folder, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers with the saved adapter, trainable."""
    from peft import PeftModel

    model = hf_model(hf_config).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = hf_model(hf_config).get_buffer(name).data  # float32 whatever the model is
    return PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False).eval()


def peft_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the names in an adapter's file."""
    named = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert all(parameter.grad is not None for parameter in named.values())
    return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}


def our_gradients(decoder: Decoder) -> dict[str, Tensor]:
    """By the names in an adapter's file, packed as in it."""
    grads: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        module, leaf = name.replace(".moe.", ".").rsplit(".", 1)
        if ".experts." not in name:
            grads[f"{PREFIX}{name}.weight"] = parameter.grad
            continue
        suffix = ".base_layer" if leaf.startswith("gate_up") else ""
        pack = pack_expert_a if leaf.endswith("A") else pack_expert_b
        is_fused = decoder.spec.moe is not None and decoder.spec.moe.is_fused
        grad = interleave(parameter.grad) if is_fused and leaf == "gate_up_lora_B" else parameter.grad
        grads[f"{PREFIX}{module}{suffix}.{leaf[-6:]}.weight"] = pack(grad)
    return grads


@pytest.mark.parametrize("name", MODELS)
def test_every_adapter_gradient_and_one_optimizer_step_match_peft(name, tmp_path):
    hf_config, batch = MODELS[name], packed()
    decoder = make_decoder(hf_config, mla_norm_eps=MlaNormEps.hf)
    save_adapter(decoder, tmp_path)
    oracle = peft_model(hf_config, tmp_path)
    probe_loss(logits_of(decoder, batch), batch[0]).backward()
    probe_loss(hf_logits(oracle, batch), batch[0]).backward()
    mine, expected = our_gradients(decoder), peft_gradients(oracle)
    assert mine.keys() == expected.keys()
    errors = {key: relative_error(mine[key], expected[key]) for key in expected}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])

    # One step of torch's AdamW, beside ours. Where a gradient is rounding noise, Adam makes a full step of its sign:
    # the next forward weighs every element by what it does.
    config = OptimConfig(lr=LR, weight_decay=0.1, max_grad_norm=0.0)
    trained = [parameter for parameter in oracle.parameters() if parameter.requires_grad]
    torch.optim.AdamW(trained, lr=LR, betas=config.betas, eps=config.eps, weight_decay=0.1).step()
    before = logits_of(decoder, batch).detach()
    trainable = [(n, p) for n, p in decoder.named_parameters() if p.requires_grad]
    Learner(trainable, config, 10, 1, decoder.layout).update(ends_version=True)
    after = hf_logits(oracle, batch).detach()
    assert relative_error(before, after) > 0.05
    assert relative_error(logits_of(decoder, batch), after) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_gradients_are_as_near_to_float32_as_pefts(name, tmp_path):
    """Both round; ours must not be further from the truth than twice theirs (one row routed elsewhere is 3 % here)."""
    hf_config, batch = MODELS[name], packed()
    wide, narrow = (
        make_decoder(hf_config, trainer_config(numerics=AS_TRANSFORMERS), dtype=d, mla_norm_eps=MlaNormEps.hf)
        for d in (torch.float32, torch.bfloat16)
    )
    save_adapter(wide, tmp_path)
    load_adapter(narrow, tmp_path)
    oracle = peft_model(hf_config, tmp_path, torch.bfloat16)
    for logits in (logits_of(wide, batch), logits_of(narrow, batch), hf_logits(oracle, batch)):
        probe_loss(logits, batch[0]).backward()
    truth, mine, theirs = our_gradients(wide), our_gradients(narrow), peft_gradients(oracle)

    def error(grads: dict[str, Tensor]) -> float:
        return relative_error(*(torch.cat([g[key].float().flatten() for key in truth]) for g in (grads, truth)))

    assert error(mine) < max(2.0 * error(theirs), 0.02)
    assert error(mine) < 0.4  # a few tokens may go to another expert, in all three
