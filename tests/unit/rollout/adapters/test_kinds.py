"""Which factors get noise before the first adapter."""

from slipstream.rollout.adapters.kinds import last_of_kind


def test_noise_of_the_probe_is_in_the_last_layer_that_has_the_kind() -> None:
    names = {
        "model.layers.0.mlp.gate_up_proj.lora_a.0", "model.layers.0.self_attn.o_proj.lora_b.0",
        "model.layers.9.self_attn.o_proj.lora_b.0", "model.layers.9.mlp.experts.w2_lora_a.0",
        "model.layers.10.mlp.experts.w2_lora_a.0", "model.layers.10.mlp.experts.w2_lora_b.0",
        "model.layers.10.self_attn.o_proj.lora_b.0",
    }  # fmt: skip
    assert set(last_of_kind(names, "experts")) == {name for name in names if "layers.10.mlp.experts" in name}
    assert last_of_kind(names, "attention") == ["model.layers.10.self_attn.o_proj.lora_b.0"]
    assert last_of_kind(names, "feed-forward") == ["model.layers.0.mlp.gate_up_proj.lora_a.0"]
    assert last_of_kind(names, "") == []
