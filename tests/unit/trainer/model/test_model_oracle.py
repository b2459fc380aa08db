"""Promise of trainer/model: logits and every gradient are transformers', whatever the packing and the recomputation."""

from typing import Any

import pytest
import torch
from cases import tiny_configs as tiny
from cases.tiny_models import (
    LENGTHS,
    gradients_under_checkpoint_names,
    hf_logits,
    hf_model,
    logits_of,
    make_decoder,
    packed,
    probe_loss,
    relative_error,
    trainer_config,
)

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Activations, MlaNormEps, TrainMode
from slipstream.trainer.kernels import delta_rule

CONFIGS = tiny.BY_FAMILY | {
    "dense_tied": {**tiny.DENSE, "tie_word_embeddings": True},
    "dense_bias": {**tiny.DENSE, "attention_bias": True},
    "dense_one_kv_head_and_theta_5e5": {**tiny.DENSE, "num_key_value_heads": 1, "rope_theta": 5e5},
    "dense_rope_parameters": {
        **tiny.DENSE,
        "rope_theta": 1.0,
        "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"},
    },
    "moe": tiny.MOE,
    "moe_not_renormalized": {**tiny.MOE, "norm_topk_prob": False},
    "moe_tied_top_3_of_5": {**tiny.MOE, "tie_word_embeddings": True, "num_experts": 5, "num_experts_per_tok": 3},
    "deepseek_without_q_lora_groups_and_yarn": {
        **{key: value for key, value in tiny.DEEPSEEK.items() if key not in ("q_lora_rank", "rope_scaling")},
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
    "deepseek_v32_all_keys": {**tiny.DEEPSEEK_V32, "index_topk": max(LENGTHS)},
    "deepseek_v32_one_key": {**tiny.DEEPSEEK_V32, "index_topk": 1},
    "llama_plain_tied_bias": {
        **{key: value for key, value in tiny.LLAMA.items() if key != "rope_scaling"},
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "glm_without_norms_and_bias": {
        **tiny.GLM,
        "use_qk_norm": False,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
    },
    "glm_lite_without_q_lora": {
        **tiny.GLM_LITE,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "n_group": 4,
        "topk_group": 2,
    },
    "gemma3_one_kv_head_untied": {**tiny.GEMMA3, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "gemma3_rope_parameters": {
        **{key: value for key, value in tiny.GEMMA3.items() if key not in ("rope_scaling", "layer_types")},
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        },
    },
    "gemma4_own_values_default_rope_no_cap": {
        **tiny.GEMMA4,
        "attention_k_eq_v": False,
        "final_logit_softcapping": None,
        "rope_parameters": {
            kind: {"rope_theta": 2e3, "rope_type": "default"} for kind in tiny.GEMMA4["rope_parameters"]
        },
    },
    "qwen3_next_one_group": {
        **tiny.QWEN3_NEXT,
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 2,
        "mlp_only_layers": [],
    },
    "minimax_whole_rope": {**tiny.MINIMAX, "rotary_dim": 20, "num_key_value_heads": 1},
    "qwen2_tied": {**tiny.QWEN2, "tie_word_embeddings": True},
    "mistral_without_window": {**tiny.MISTRAL, "sliding_window": None},
    "qwen2_moe_normalized": {**tiny.QWEN2_MOE, "norm_topk_prob": True},
    "deepseek_two_shared": {**tiny.DEEPSEEK, "n_shared_experts": 2},
}
FULL = trainer_config(TrainMode.full, train_router=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_gradient_match_transformers(name):
    hf_config = CONFIGS[name]
    batch = packed()
    ours, oracle = make_decoder(hf_config, FULL, mla_norm_eps=MlaNormEps.hf), hf_model(hf_config)
    our_logits, oracle_logits = logits_of(ours, batch), hf_logits(oracle, batch)
    assert relative_error(our_logits, oracle_logits) < 1e-5

    probe_loss(our_logits, batch[0]).backward()
    probe_loss(oracle_logits, batch[0]).backward()
    expected = {name: p.grad for name, p in oracle.named_parameters() if ".indexer." not in name}
    actual = gradients_under_checkpoint_names(ours)
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", tiny.BY_FAMILY)
def test_packed_equals_unpacked(name):
    decoder = make_decoder(tiny.BY_FAMILY[name])
    token_ids, positions, cu_seqlens = batch = packed()
    together = logits_of(decoder, batch)
    alone = [
        logits_of(decoder, (token_ids[a:b], positions[a:b], torch.tensor([0, b - a])))
        for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    ]
    assert relative_error(together, torch.cat(alone)) < 1e-6


@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
@pytest.mark.parametrize(
    "hf_config",
    [tiny.MIXED, tiny.GEMMA3, tiny.GEMMA4_MOE, tiny.DEEPSEEK_V32],
    ids=["moe", "gemma3", "gemma4_moe", "deepseek_v32"],
)
def test_recomputation_changes_no_bit(hf_config, mode):
    batch = packed()
    results = []
    for checkpointing in (True, False):
        decoder = make_decoder(
            hf_config, trainer_config(mode, activations=Activations("recompute" if checkpointing else "keep"))
        )
        logits = logits_of(decoder, batch)
        probe_loss(logits, batch[0]).backward()
        results.append((logits, {n: p.grad for n, p in decoder.named_parameters() if p.requires_grad}))
    (logits_on, grads_on), (logits_off, grads_off) = results
    assert torch.equal(logits_on, logits_off)
    assert grads_on.keys() == grads_off.keys()
    assert all(torch.equal(grads_on[name], grads_off[name]) for name in grads_on)


@pytest.mark.parametrize("hf_config", tiny.BY_FAMILY.values(), ids=tiny.BY_FAMILY)
def test_a_microbatch_without_tokens_gives_gradients_of_zeros(hf_config):
    for mode in (TrainMode.lora, TrainMode.full):
        decoder = make_decoder(hf_config, trainer_config(mode))
        batch = packed(())
        logits = logits_of(decoder, batch)
        assert logits.shape == (0, tiny.COMMON["vocab_size"])
        logits.sum().backward()
        for name, parameter in decoder.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert not parameter.grad.any(), name


def test_the_eps_of_latent_norms_follows_the_engine_or_transformers():
    """transformers leaves them at 1e-6 whatever the config says; an engine takes rms_norm_eps."""
    batch, config = packed(), {**tiny.DEEPSEEK, "rms_norm_eps": 1e-3}
    oracle: Any = hf_model(config)
    expected = hf_logits(oracle, batch)
    assert relative_error(logits_of(make_decoder(config, FULL, mla_norm_eps=MlaNormEps.hf), batch), expected) < 1e-5
    rollout = logits_of(make_decoder(config, FULL), batch)
    assert relative_error(rollout, expected) > 1e-4
    for layer in oracle.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = 1e-3
        layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-3
    assert relative_error(rollout, hf_logits(oracle, batch)) < 1e-5


def test_rates_of_decay_are_as_wide_as_an_engine_has_them():
    decoder = make_decoder(tiny.QWEN3_NEXT, dtype=torch.bfloat16)
    dtypes = {name.rpartition(".")[2]: parameter.dtype for name, parameter in decoder.named_parameters()}
    assert (dtypes["A_log"], dtypes["dt_bias"]) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_chunks_of_the_delta_rule_are_its_recurrence(length):
    """The definition, token by token, in float64; tokens after the end change nothing."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length + 5, size, generator=generator) for size in (8, 8, 6))
    decay, beta = -torch.rand(2, 3, length + 5, generator=generator), torch.rand(2, 3, length + 5, generator=generator)
    wide_q, wide_k = (x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, wanted = torch.zeros(2, 3, 8, 6, dtype=torch.float64), []
    for t in range(length):
        state = state * decay[:, :, t, None, None].double().exp()
        update = (v[:, :, t].double() - (wide_k[:, :, t, None] @ state)[:, :, 0]) * beta[:, :, t, None]
        state = state + wide_k[:, :, t, :, None] * update[:, :, None]
        wanted.append((wide_q[:, :, t, None] @ state)[:, :, 0] * 8**-0.5)
    found = delta_rule.gated_delta_rule(q, k, v, decay, beta)[:, :, :length]
    assert relative_error(found, torch.stack(wanted, dim=2)) < 1e-5


def test_cu_seqlens_that_do_not_fit_are_refused():
    decoder = make_decoder(tiny.DENSE)
    token_ids, positions, _ = packed()
    for wrong in ([0, 7], [0, 30, 24], [1, 24], []):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0"):
            decoder(token_ids, positions, torch.tensor(wrong, dtype=torch.int64))
    assert sum(LENGTHS) == 24


def test_a_table_that_is_also_the_head_stays_on_the_device():
    tied = {**tiny.DENSE, "tie_word_embeddings": True}
    with pytest.raises(ConfigError, match="embedding_on_host=true needs a head of its own"):
        make_decoder(tied, trainer_config(embedding_on_host=True))
