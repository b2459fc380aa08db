"""Forms of weights after loading: MLA's derivation repeated in place, and refusals that say why. vLLM's own classes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from fakes.readable_weights import readable
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

from slipstream.rollout.errors import UnsupportedWeights
from slipstream.rollout.in_vllm.post_load import Forms, refuse_unwritable
from slipstream.weight_sync.layout import PostLoad

HEADS, LATENT, NOPE, VALUE = 2, 8, 3, 5


def bare(cls: Any, **attributes: Any) -> Any:
    """An object of a vLLM class without its constructor, which wants a whole engine."""
    made = cls.__new__(cls)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def linear(method: Any, weight: torch.Tensor) -> Any:
    made = nn.Module()
    made.quant_method = method
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def latent_attention(*, dtype: torch.dtype) -> Any:
    """An MLA layer whose kv_b_proj has this dtype, after vLLM's own loading for a float32 engine."""
    weight = torch.randn(HEADS * (NOPE + VALUE), LATENT).to(dtype)
    model = nn.Module()
    model.kv_b_proj = linear(UnquantizedLinearMethod(), weight)
    model.attention = bare(
        MLAAttention, impl=SimpleNamespace(process_weights_after_loading=lambda _: None), is_amx_bmm_enabled=False,
        dcp_q_replicate=False, is_aiter_triton_fp4_bmm_enabled=False, is_aiter_triton_fp8_bmm_enabled=False,
        kv_b_proj=model.kv_b_proj, num_heads=HEADS, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, v_head_dim=VALUE,
        quant_config=None, layer_name="attention", _q_scale=torch.ones(1), _k_scale=torch.ones(1),
        _v_scale=torch.ones(1), _prob_scale=torch.ones(1),
    )  # fmt: skip
    model.attention.process_weights_after_loading(torch.float32)
    return model


def test_derived_matrices_are_computed_again_where_they_lie():
    torch.manual_seed(0)
    model = latent_attention(dtype=torch.bfloat16)
    forms = Forms.of(model, torch.float32)
    derived = {name for name, form in forms.post_load.items() if form is PostLoad.derived}
    assert derived == {"attention.W_UV", "attention.W_UK_T"}
    addresses = {name: readable(model)[name].data_ptr() for name in derived}
    weight = torch.randn(HEADS * (NOPE + VALUE), LATENT).to(torch.bfloat16)
    model.kv_b_proj.weight.data.copy_(weight)
    for name in derived:
        readable(model)[name].data.zero_()
    forms.recompute()
    after = readable(model)
    assert {name: after[name].data_ptr() for name in derived} == addresses
    heads = weight.float().view(HEADS, NOPE + VALUE, LATENT)
    for head in range(HEADS):
        assert torch.equal(after["attention.W_UK_T"][head], heads[head, :NOPE])
        assert torch.equal(after["attention.W_UV"][head], heads[head, NOPE:].T)


class RebindingAttention(nn.Module):
    """vLLM 0.25.1's way: every derivation makes fresh tensors, of other strides, and binds them."""

    def __init__(self, kv_b_proj: nn.Module) -> None:
        super().__init__()
        self.kv_b_proj: Any = kv_b_proj
        self.process_weights_after_loading(torch.float32)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Double the weights, so that no view of them could do."""
        values = self.kv_b_proj.weight.to(act_dtype).mul(2).T
        self.W_UV, self.W_UK_T = values[:, :4].T, values[:, 4:].contiguous()


def test_fresh_results_go_to_the_old_addresses():
    model = nn.Module()
    model.kv_b_proj = linear(UnquantizedLinearMethod(), torch.randn(8, 6))
    model.attention = RebindingAttention(model.kv_b_proj)
    forms = Forms.of(model, torch.float32)
    places = {name: (tensor, tensor.data_ptr()) for name, tensor in readable(model).items() if "W_U" in name}
    assert len(places) == 2
    weight = torch.randn(8, 6)
    model.kv_b_proj.weight.data.copy_(weight)
    forms.recompute()
    for name, (tensor, address) in places.items():
        assert readable(model)[name] is tensor
        assert tensor.data_ptr() == address
    assert torch.equal(model.attention.W_UV, weight.mul(2)[:4])
    assert torch.equal(model.attention.W_UK_T, weight.mul(2).T[:, 4:])


def test_views_of_what_is_written_need_nothing():
    model = latent_attention(dtype=torch.float32)
    forms = Forms.of(model, torch.float32)
    assert forms.post_load == {}
    assert list(forms.params) == ["kv_b_proj.weight"]
    assert set(readable(model)) >= {"kv_b_proj.weight", "attention.W_UV", "attention.W_UK_T"}


def experts(method: Any) -> nn.Module:
    made = nn.Module()
    made.quant_method = method
    for leaf in ("w13_weight", "w2_weight"):
        made.register_parameter(leaf, nn.Parameter(torch.zeros(1, 2, 2), requires_grad=False))
    return made


FP8 = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)


def fp8_linear(kernel: type, *, block_quant: bool = True) -> Any:
    return bare(Fp8LinearMethod, block_quant=block_quant, fp8_linear=object.__new__(kernel))


def fp8_experts(backend: Fp8MoeBackend, *, block_quant: bool = True) -> Any:
    return bare(Fp8MoEMethod, block_quant=block_quant, fp8_backend=backend)


class Int4Method:
    """Stands for any of vLLM's methods of packed weights."""


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (linear(fp8_linear(DeepGemmFp8BlockScaledMMKernel), FP8), "DeepGemm.* rewrites .*VLLM_USE_DEEP"),
        (linear(fp8_linear(TritonFp8BlockScaledMMKernel, block_quant=False), FP8), "only block-FP8"),
        (linear(Int4Method(), torch.zeros(2, 2)), "quantized by Int4Method.*accept adapter mode only"),
        (experts(Int4Method()), "experts are quantized by Int4Method.*accept adapter mode only"),
        (experts(fp8_experts(Fp8MoeBackend.FLASHINFER_CUTLASS)), "FLASHINFER_CUTLASS.* reorder"),
        (experts(fp8_experts(Fp8MoeBackend.DEEPGEMM)), "DEEPGEMM.* reorder"),
        (experts(fp8_experts(Fp8MoeBackend.TRITON, block_quant=False)), "only block-FP8"),
        (linear(UnquantizedLinearMethod(), torch.zeros(0)), "are empty"),
    ],
)  # fmt: skip
def test_what_a_write_cannot_fill_is_refused_with_the_reason(layer: nn.Module, reason: str):
    model = nn.Module()
    model.layer = layer
    with pytest.raises(UnsupportedWeights, match=f"layer.*{reason}"):
        Forms.of(model, torch.bfloat16)


def test_block_fp8_on_the_pinned_kernels_is_the_identity():
    model = nn.Module()
    model.linear = linear(fp8_linear(TritonFp8BlockScaledMMKernel), FP8)
    model.experts = experts(fp8_experts(Fp8MoeBackend.TRITON))
    forms = Forms.of(model, torch.bfloat16)
    assert forms.post_load == {}
    assert set(forms.params) == {"linear.weight", "experts.w13_weight", "experts.w2_weight"}


def options(**changes: Any) -> Any:
    """The parts of a VllmConfig that decide, as vLLM names them; checked against its own classes below."""
    values: dict[str, Any] = {
        "enable_eplb": False, "pipeline_parallel_size": 1, "cpu_offload_gb": 0.0, "offload_group_size": 0,
        "enable_sleep_mode": False, "speculative_config": None, **changes,
    }  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_eplb=values["enable_eplb"], pipeline_parallel_size=values["pipeline_parallel_size"]
        ),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=values["cpu_offload_gb"]),
            prefetch=SimpleNamespace(offload_group_size=values["offload_group_size"]),
        ),
        model_config=SimpleNamespace(enable_sleep_mode=values["enable_sleep_mode"]),
        speculative_config=values["speculative_config"],
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"enable_eplb": True}, "enable_eplb: experts move"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size > 1"),
        ({"cpu_offload_gb": 4.0}, "cpu_offload_gb.*host memory"),
        ({"offload_group_size": 2}, "offload_group_size.*host memory"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode: a sleeping engine"),
        ({"speculative_config": object()}, "speculative_config: a draft model"),
    ],
)
def test_engine_options_that_move_weights_are_refused(change: dict[str, Any], named: str):
    with pytest.raises(UnsupportedWeights, match=named):
        refuse_unwritable(options(**change))


def test_a_plain_engine_is_not_refused_and_options_have_vllms_names():
    from dataclasses import fields

    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.config.offload import OffloadConfig

    refuse_unwritable(options())
    for cls, names in (
        (ParallelConfig, {"enable_eplb", "pipeline_parallel_size"}),
        (ModelConfig, {"enable_sleep_mode"}),
        (OffloadConfig, {"uva", "prefetch"}),
        (VllmConfig, {"speculative_config", "offload_config"}),
    ):
        assert names <= {field.name for field in fields(cls)}
