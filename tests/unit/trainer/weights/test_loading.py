"""Promise of trainer/weights/loading.py: every parameter is filled from the right place, or the missing tensor is
named."""

import hashlib
import math
from typing import Any

import pytest
import torch
from cases.tiny_configs import DEEPSEEK, DENSE, MIXED, QWEN3_NEXT
from cases.tiny_models import make_decoder
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import Init, ModelConfig
from slipstream.trainer.adapter_io import save_merged
from slipstream.trainer.errors import CheckpointError
from slipstream.trainer.weights import loading
from slipstream.trainer.weights.loading import (
    CheckpointReader,
    RandomReader,
    fill_uniform,
    init_adapters,
    load_weights,
    open_reader,
)
from slipstream.weight_sync.layout import Region

SPEC = read_config(MIXED)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_merged(make_decoder(MIXED, nonzero_b=False), folder, MIXED)
    return folder


def with_tensors(checkpoint, folder, change):
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return CheckpointReader(folder, SPEC)


def test_a_checkpoint_fills_every_parameter(checkpoint):
    expected, decoder = make_decoder(MIXED, nonzero_b=False), make_decoder(MIXED)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(torch.nan)
    report = load_weights(decoder, open_reader(ModelConfig(path=str(checkpoint)), SPEC, seed=0, device="cpu"), seed=3)
    assert report.num_tensors == len(SPEC.checkpoint_tensors("float32"))
    assert report.num_bytes == sum(4 * p.numel() for n, p in decoder.named_parameters() if "lora_" not in n)
    for (name, mine), wanted in zip(decoder.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, wanted), name


def test_a_missing_or_misshapen_tensor_is_named_and_an_extra_one_reported(checkpoint, tmp_path):
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    decoder = make_decoder(MIXED)
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        load_weights(decoder, with_tensors(checkpoint, tmp_path, lambda tensors: tensors.pop(name)), seed=0)
    turned = lambda tensors: tensors.update({name: tensors[name].t().contiguous()})  # noqa: E731
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(64, 32\), the model needs \(32, 64\)"):
        load_weights(decoder, with_tensors(checkpoint, tmp_path, turned), seed=0)
    raw = lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})  # noqa: E731
    with pytest.raises(CheckpointError, match=f"{name} is FP8 without {name}_scale_inv"):
        load_weights(decoder, with_tensors(checkpoint, tmp_path, raw), seed=0)
    whole = lambda tensors: tensors.update({name: tensors[name].to(torch.int32)})  # noqa: E731
    with pytest.raises(CheckpointError, match=rf"{name} is stored as torch\.int32, which cannot be read as weights"):
        load_weights(decoder, with_tensors(checkpoint, tmp_path, whole), seed=0)
    extra = lambda tensors: tensors.update({"model.extra": torch.ones(1)})  # noqa: E731
    assert load_weights(decoder, with_tensors(checkpoint, tmp_path, extra), seed=0).ignored == ("model.extra",)


def test_tensors_of_multi_token_prediction_are_counted_apart(tmp_path):
    decoder = make_decoder(DEEPSEEK, nonzero_b=False)
    save_merged(decoder, tmp_path, DEEPSEEK)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"model.layers.3.eh_proj.weight": torch.ones(1), "model.layers.3.enorm.weight": torch.ones(1)}
    tensors |= {"model.layers.4.eh_proj.weight": torch.ones(1)}  # the config names one such layer
    tensors |= {"mtp.fc.weight": torch.ones(1)}  # as Qwen3-Next calls them
    save_file(tensors, tmp_path / "model.safetensors")
    report = load_weights(decoder, CheckpointReader(tmp_path, decoder.spec), seed=0)
    assert (report.num_mtp_tensors, report.ignored) == (3, ("model.layers.4.eh_proj.weight",))


def test_a_folder_without_weights_or_with_a_broken_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        CheckpointReader(tmp_path, SPEC)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        CheckpointReader(tmp_path, SPEC)


def test_random_weights_have_the_declared_spread_and_norms_of_one():
    decoder = make_decoder(MIXED)
    config = ModelConfig(init=Init.random, hf_config=MIXED | {"initializer_range": 0.3})
    load_weights(decoder, open_reader(config, SPEC, seed=1, device="cpu"), seed=1)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((parameter == 1).all()), name
        elif "lora_" not in name and parameter.numel() > 4000:
            assert float(parameter.detach().std()) == pytest.approx(0.3, rel=0.1), name
    layer: Any = decoder.model.layers[0]
    assert layer.mlp.experts.gate_up_proj.unique(dim=0).shape[0] == 8


def test_an_element_of_a_fresh_adapter_is_splitmix64_of_its_key_and_index():
    """Uniform in +-1 / sqrt(in), as Kaiming. The key and the index are those of the whole stack, for an expert too, so
    no layout can change the value. B is zero."""
    mask = (1 << 64) - 1

    def expected(name: str, index: int, fan_in: int) -> float:
        key = int.from_bytes(hashlib.sha256(f"3/{name}".encode()).digest()[:8], "little") >> 1
        z = (key + index + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        bits = z >> 40  # z ^ (z >> 31) has the same upper 24 bits
        bits -= (bits >> 23) << 24
        return float(torch.tensor(bits * 2.0**-23, dtype=torch.float32) * (1 / math.sqrt(fan_in)))

    decoder = make_decoder(MIXED)
    init_adapters(decoder, seed=3)
    parameters = dict(decoder.named_parameters())
    assert not any(parameter.any() for name, parameter in parameters.items() if "lora_B" in name)
    for name in ("model.layers.0.self_attn.o_proj.lora_A", "model.layers.0.mlp.experts.down_lora_A"):
        flat = parameters[name].detach().flatten()
        for index in (0, 1, 77, flat.numel() - 1):
            assert float(flat[index]) == expected(name, index, parameters[name].shape[-1]), (name, index)
    stack = parameters["model.layers.0.mlp.experts.down_lora_A"]
    experts: Any = decoder.get_submodule("model.layers.0.mlp.experts")
    experts.first_expert = 5  # as of a rank that holds later ones
    init_adapters(decoder, seed=3)
    index = 5 * stack[0].numel()
    assert float(stack.flatten()[0]) == expected("model.layers.0.mlp.experts.down_lora_A", index, stack.shape[-1])


def test_random_norms_change_nothing_in_whichever_way_a_family_writes_them():
    """1, or 0 where one is added to it; linear attention's own norms have none added."""
    for config, expected in ((QWEN3_NEXT, {"linear_attn.norm": 1.0, "norm": 0.0}), (DENSE, {"norm": 1.0})):
        spec = read_config(config)
        reader = RandomReader(spec, seed=0, std=1.0, device="cpu")
        norms = {name: one.shape for name, one in spec.parameters().items() if name.endswith("norm.weight")}
        assert len(norms) > 2 * spec.num_layers
        for name, shape in norms.items():
            kind = next(kind for kind in expected if name.endswith(f"{kind}.weight"))
            assert set(reader.read(name, Region((0,), shape)).tolist()) == {expected[kind]}, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uniform_numbers_do_not_depend_on_cuts_or_chunks(dtype):
    def numbers(first: int, count: int) -> torch.Tensor:
        out = torch.full((count,), torch.nan, dtype=dtype)
        fill_uniform(out, bound=0.3, key=(1 << 63) - 5, first_element=first)  # keys near the top wrap
        return out

    whole = numbers(0, 40_000)  # two whole chunks and a part
    assert whole.isfinite().all()
    for first, stop in ((0, 1), (16_383, 16_385), (7, 39_999), (40_000, 40_000)):
        assert torch.equal(numbers(first, stop - first), whole[first:stop])


def test_a_slice_of_random_weights_costs_its_blocks_and_is_the_slice_of_the_whole(monkeypatch):
    drawn: list[int] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.normal:
                drawn.append(result.numel())
            return result

    monkeypatch.setattr(loading, "BLOCK_ELEMENTS", 10 * 64)
    reader, other = (RandomReader(SPEC, seed=seed, std=1.0, device="cpu") for seed in (0, 1))
    with Watch():
        whole = reader.read("lm_head.weight", Region((0, 0), (96, 64)))  # ten blocks of ten rows, the last of six
    assert drawn == [640] * 9 + [384]
    assert whole.unique().numel() == pytest.approx(96 * 64, rel=0.01)  # no block repeats another
    for start, rows, blocks in ((0, 1, 1), (9, 2, 2), (30, 10, 1), (88, 8, 2)):
        drawn.clear()
        with Watch():
            part = reader.read("lm_head.weight", Region((start, 0), (rows, 64)))
        assert torch.equal(part, whole[start : start + rows])
        assert len(drawn) == blocks
    assert torch.equal(reader.read("lm_head.weight", Region((9, 5), (2, 7))), whole[9:11, 5:12])
    assert not torch.equal(other.read("lm_head.weight", Region((9, 5), (2, 7))), whole[9:11, 5:12])


def test_a_block_fp8_checkpoint_is_read_as_its_values(tmp_path):
    """Any rows of it, also those that begin inside a block; a tensor without scales is refused."""
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(2)) + 0.1
    name = "model.layers.0.mlp.down_proj.weight"
    spec = read_config({**DENSE, "hidden_size": 300, "intermediate_size": 200})
    save_file({name: weight, f"{name}_scale_inv": scales}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path, spec)
    for start, stop in ((0, 300), (100, 150), (130, 300)):
        values = reader.read(name, Region((start, 0), (stop - start, 200)))
        for row in range(start, stop, 7):
            for column in range(0, 200, 11):
                expected = weight[row, column].float() * scales[row // 128, column // 128]
                assert values[row - start, column] == expected
    whole = reader.read(name, Region((0, 0), (300, 200)))
    assert torch.equal(reader.read(name, Region((100, 120), (50, 60))), whole[100:150, 120:180])
    save_file({name: weight}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"FP8 without .*weight_scale_inv"):
        CheckpointReader(tmp_path, spec).read(name, Region((0, 0), (1, 200)))
