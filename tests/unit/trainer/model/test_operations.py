"""The list of operations is the decoder: chained, it returns the same bits; isolated, each takes what it is given."""

import pytest
import torch
from cases.tiny_configs import BY_FAMILY, DENSE, MIXED
from cases.tiny_models import make_decoder, packed

from slipstream.trainer.model.comparison import decoder_steps, run_chained, run_isolated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", BY_FAMILY)
def test_chained_operations_are_the_forward_bit_by_bit(family: str, dtype: torch.dtype):
    decoder = make_decoder(BY_FAMILY[family], dtype=dtype)
    token_ids, positions, cu_seqlens = packed()
    chained = run_chained(decoder_steps(decoder, positions, cu_seqlens), {"token_ids": token_ids})
    with torch.no_grad():
        assert torch.equal(chained["norm"], decoder(token_ids, positions, cu_seqlens))


def test_an_operation_is_run_on_what_is_given_and_not_on_what_others_returned():
    decoder = make_decoder(DENSE)
    token_ids, positions, cu_seqlens = packed()
    operations = decoder_steps(decoder, positions, cu_seqlens)
    own = run_chained(operations, {"token_ids": token_ids})
    moved = own["layers.1.stream"] + 1
    addends = [moved, *(own[f"layers.1.{name}"] for name in ("self_attn.o_proj", "mlp"))]
    given = dict(zip(("layers.1.stream", "layers.1.self_attn.o_proj", "layers.1.mlp"), addends, strict=True))
    ran = {operation.name: out for operation, (out, *_) in run_isolated(operations, given)}
    assert set(ran) == {"layers.1.residual", "layers.1.post_attention_layernorm"}
    assert torch.equal(ran["layers.1.residual"], sum(addends))


def test_what_is_replaced_reaches_everything_after_it_and_nothing_before():
    decoder = make_decoder(MIXED)
    token_ids, positions, cu_seqlens = packed()
    operations = decoder_steps(decoder, positions, cu_seqlens)
    own = run_chained(operations, {"token_ids": token_ids})
    given = {"token_ids": token_ids, "layers.1.mlp": torch.zeros_like(own["layers.1.mlp"])}
    other = run_chained(operations, given, {"layers.1.mlp"})
    assert torch.equal(other["layers.1.post_attention_layernorm"], own["layers.1.post_attention_layernorm"])
    assert torch.equal(other["layers.2.stream"], own["layers.1.stream_mid"])
    assert not torch.equal(other["norm"], own["norm"])
