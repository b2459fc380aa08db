"""Roundings.attention=engine on a GPU: vLLM's FlashAttention 3 forward, the trainer's own backward.

Values and gradients against plain products in float64.
"""

import pytest
import torch
from cases.tiny_configs import DENSE, GPT_OSS
from cases.tiny_models import by_place, logits_of, make_decoder, packed, probe_loss, relative_error, trainer_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import AttentionValues, TrainMode
from slipstream.trainer.engine_ops.engine_forward import choose_forward
from slipstream.trainer.engine_ops.vllm_operations import VllmAttention
from slipstream.trainer.model.attention.attend import AttentionBackend, attend
from slipstream.trainer.model.attention.flash_attention import AttentionCall, KeptAttention
from slipstream.trainer.model.packed_sequences import PackedSequences

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]

SHORT, LONG = (70, 1, 130, 33), (1500, 1, 0, 2048)
SHAPES = {
    "gqa": (8, 2, 128, 128, None, False, SHORT),
    "one head of keys": (8, 1, 64, 64, None, False, SHORT),
    "window": (8, 2, 64, 64, 40, False, SHORT),
    "sinks": (8, 2, 64, 64, None, True, SHORT),
    "sinks in a window": (8, 2, 64, 64, 40, True, SHORT),
    "latent": (8, 8, 192, 128, None, False, SHORT),
    "long": (8, 2, 128, 128, None, False, LONG),
    "long and latent": (8, 8, 192, 128, None, False, LONG),
    "long in a window": (8, 2, 64, 64, 200, True, LONG),
}
"""Heads of queries and of keys, their width, that of values, window, sinks, lengths."""


def plain(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: tuple[int, ...], window: int | None, scale: float
) -> Tensor:
    """The definition, one sequence at a time."""
    repeats, outs, start = q.shape[1] // k.shape[1], [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        q_NLD, k_NLD, v_NLV = (
            x[rows].repeat_interleave(n, 1).transpose(0, 1) for x, n in ((q, 1), (k, repeats), (v, repeats))
        )
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        hidden = (distance < 0) | (distance >= (window or length + 1))
        logits = (scale * q_NLD @ k_NLD.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        if sinks is not None:
            logits = torch.cat((logits, sinks[:, None, None].expand(-1, length, 1)), -1)
        outs.append((logits.softmax(-1)[..., :length] @ v_NLV).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_those_of_plain_products(name: str) -> None:
    """Also when the layer is recomputed in backward, which takes the first call's values."""
    heads, kv_heads, width, value_width, window, has_sinks, lengths = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    tokens = sum(lengths)
    beside = draw(tokens, kv_heads, 128 + value_width)  # a latent's values lie beside its keys
    inputs = [draw(tokens, heads, width), draw(tokens, kv_heads, width), beside[..., 128:]]
    inputs += [draw(heads)] if has_sinks else []
    inputs = [x.detach().requires_grad_() for x in inputs]
    sequences = PackedSequences.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), tokens, torch.device("cuda"))
    backend = AttentionBackend.cudnn if lengths is LONG and not has_sinks else AttentionBackend.varlen
    kept, scale, dout = KeptAttention(), 1.3 * width**-0.5, draw(tokens, heads, value_width)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend(q, k, v, AttentionCall(sequences, scale, window, sinks, kept), backend, VllmAttention())

    mine = checkpoint(run, *inputs, use_reentrant=False)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v, *sinks = exact
    wanted = plain(q, k, v, sinks[0] if has_sinks else None, lengths, window, scale)
    assert relative_error(mine, wanted) < 5e-3
    grads = torch.autograd.grad(mine, inputs, dout)
    for what, one, other in zip(
        ("dq", "dk", "dv", "dsinks"), grads, torch.autograd.grad(wanted, exact, dout.double()), strict=False
    ):
        assert relative_error(one, other) < 1e-2, what
    assert kept.take() is None


def test_the_sums_are_whole_natural_logarithms() -> None:
    """[N, T], with the sink's term: what torch's and cuDNN's backward are given."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(9, n, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    sinks = torch.randn(4, generator=generator, device="cuda", dtype=torch.bfloat16)
    sequences = PackedSequences.from_cu_seqlens(torch.tensor([0, 9]), 9, torch.device("cuda"))
    logits = 0.5 * q.double().transpose(0, 1) @ k.double().repeat_interleave(2, 1).permute(1, 2, 0)
    logits = logits.masked_fill(torch.ones(9, 9, device="cuda").triu(1).bool(), -torch.inf)
    for given in (None, sinks):
        _, sums_NT = VllmAttention()(q, k, v, AttentionCall(sequences, 0.5, sinks_N=given))
        terms = logits if given is None else torch.cat((logits, given.double()[:, None, None].expand(-1, 9, 1)), -1)
        assert sums_NT.dtype is torch.float32
        torch.testing.assert_close(sums_NT.double(), terms.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("config", "mode"), [(DENSE, TrainMode.lora), (GPT_OSS, TrainMode.full)], ids=["dense", "oss"])
def test_a_decoder_with_the_engines_attention_is_near_its_own(config: dict[str, object], mode: TrainMode) -> None:
    """Logits and gradients, the sinks' among them; and it is what the log says that it is."""
    config = {**config, "head_dim": 64}
    token_ids, positions, starts = packed()
    batch = token_ids.cuda(), positions.cuda(), starts
    found = []
    for values in (AttentionValues.engine, AttentionValues.own):
        trainer = trainer_config(mode, numerics=by_place(attention=values))
        by = choose_forward(read_config(config), torch.bfloat16, trainer, torch.device("cuda"))
        decoder = make_decoder(config, trainer, dtype=torch.bfloat16, device="cuda", by=by)
        assert ("vLLM" in decoder.backends["attention values"]) is (values is AttentionValues.engine)
        logits = logits_of(decoder, batch)
        probe_loss(logits, batch[0]).backward()
        found.append((logits, {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}))
    (mine, grads), (own, own_grads) = found
    assert relative_error(mine, own) < 0.05
    assert grads.keys() == own_grads.keys()
    attention = [name for name in grads if "self_attn" in name]
    assert attention
    for name in attention:
        assert relative_error(grads[name], own_grads[name]) < 0.1, name
