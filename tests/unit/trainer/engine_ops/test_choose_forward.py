"""Roundings.attention: whose kernel computes the attention's values, and when it is refused.

vLLM's kernel runs in tests/gpu/test_engine_attention_gpu.py. Here another kernel takes its place: plain products, which
return the sums that a kernel returns.
"""

import pytest
import torch
from cases.tiny_configs import DEEPSEEK, DENSE, GPT_OSS
from cases.tiny_models import by_place, logits_of, make_decoder, packed, trainer_config
from torch import Tensor

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import AttentionValues
from slipstream.trainer.engine_ops.engine_forward import choose_forward
from slipstream.trainer.engine_ops.vllm_attention import refusal_of_engine_attention
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.model.attention.attend import AttentionBackend, attend
from slipstream.trainer.model.attention.flash_attention import AttentionCall, KeptAttention
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.packed_sequences import PackedSequences

CPU, SPEC = torch.device("cpu"), read_config(DENSE)
CALLS: list[tuple[float, int | None]] = []


def engine(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """An EngineKernel in float64."""
    sequences, scale, window, sinks_N = call.sequences, call.scale, call.window, call.sinks_N
    CALLS.append((scale, window))
    repeats = q_TND.shape[1] // k_TGD.shape[1]
    q_NTD, k_NTD, v_NTV = (
        x.double().repeat_interleave(n, 1).transpose(0, 1) for x, n in ((q_TND, 1), (k_TGD, repeats), (v_TGV, repeats))
    )
    of_sequence = torch.searchsorted(sequences.cu_seqlens[1:], torch.arange(q_TND.shape[0]), right=True)
    distance = torch.arange(q_TND.shape[0])[:, None] - torch.arange(q_TND.shape[0])
    sees = (distance >= 0) & (distance < (window or len(distance))) & (of_sequence[:, None] == of_sequence)
    logits = (scale * q_NTD @ k_NTD.transpose(1, 2)).masked_fill(~sees, -torch.inf)
    sums = logits.logsumexp(-1)
    if sinks_N is not None:
        sums = torch.logaddexp(sums, sinks_N.double()[:, None])
    out = torch.exp(logits - sums[..., None]) @ v_NTV
    return out.transpose(0, 1).to(q_TND.dtype), sums.float()


@pytest.mark.parametrize(("config", "calls"), [(DENSE, 2), (DEEPSEEK, 3), (GPT_OSS, 2)], ids=["gqa", "mla", "sinks"])
def test_the_engines_kernel_computes_every_layers_attention(config: dict[str, object], calls: int) -> None:
    """With scale, window and sinks; the values are those of the trainer's own."""
    batch, decoder = packed(), make_decoder(config)
    with torch.no_grad():
        own = logits_of(decoder, batch)
        CALLS.clear()
        mine = logits_of(decoder, batch, by=Forward(attention=engine))
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-4)
    assert len(CALLS) == calls
    if config is GPT_OSS:
        assert [window for _, window in CALLS] == [4, None]


def test_a_recomputed_layer_takes_the_kept_values() -> None:
    """Checkpointing does not call the kernel again: what backward starts from are the first call's values."""

    q, k, v = (torch.randn(7, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sequences = PackedSequences.from_cu_seqlens(torch.tensor([0, 3, 7]), 7, CPU)
    kept = KeptAttention()
    CALLS.clear()
    first, again = (
        attend(q, k, v, AttentionCall(sequences, 0.3, kept=kept), AttentionBackend.padded, engine) for _ in range(2)
    )
    assert len(CALLS) == 1
    assert torch.equal(first, again)
    assert kept.take() is None


def test_a_node_that_cannot_run_it_says_so_once_or_takes_its_own() -> None:
    """Asked for, it is refused with one message; by default the trainer's own is taken, and the log says why."""
    own = "the trainer's own"
    for values, told in ((AttentionValues.own, own), (AttentionValues.auto, f"{own} (the trainer has no GPU)")):
        by = choose_forward(SPEC, torch.bfloat16, trainer_config(numerics=by_place(attention=values)), CPU)
        decoder = make_decoder(DENSE, dtype=torch.bfloat16, by=by)
        assert decoder.backends == {"attention": "padded", "attention values": told}
    asked = trainer_config(numerics=by_place(attention=AttentionValues.engine))
    with pytest.raises(TrainerError, match="engine's kernel cannot be had: the trainer has no GPU"):
        choose_forward(SPEC, torch.bfloat16, asked, CPU)


@pytest.mark.parametrize(
    ("change", "dtype", "major", "reason"),
    [
        ({}, torch.float32, 9, "model.dtype=float32 is not one of bfloat16, float16"),
        ({}, torch.bfloat16, 8, "is for Hopper GPUs, this one has compute capability 8.0"),
        ({"head_dim": 20}, torch.bfloat16, 9, "heads of width 20"),
        ({"head_dim": 512}, torch.bfloat16, 9, "heads of width 512"),
        (DEEPSEEK, torch.bfloat16, 9, "heads of width 20"),
        ({"head_dim": 128}, torch.bfloat16, 9, "vLLM's attention cannot be imported where the trainer runs"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_each_reason_is_told(change: dict[str, object], dtype: torch.dtype, major: int, reason: str) -> None:
    """The last one is of a machine whose vLLM has no kernels for GPUs."""
    if torch.cuda.is_available() and reason.startswith("vLLM"):
        pytest.skip("this machine's vLLM has kernels for GPUs")
    told = refusal_of_engine_attention((major, 0), dtype, read_config({**DENSE, **change}).attentions[0])
    assert told is not None and reason in told


def test_log_sums_are_cut_out_as_the_rows_they_belong_to() -> None:
    """For cuDNN, which takes sequences of one length at a time; zeros where it pads."""
    from slipstream.trainer.model.attention.flash_attention import cut_out, cut_out_log_sums, runs_of_equal_length

    starts = (0, 130, 260, 260, 300)
    rows = torch.randn(300, 4)
    parts = cut_out_log_sums(rows.t(), starts)
    for part, run in zip(parts, runs_of_equal_length(starts), strict=True):
        assert part.is_contiguous()
        assert torch.equal(part, cut_out(rows[..., None], run))
