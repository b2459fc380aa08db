"""Promise of trainer/weights/packed_experts.py: four-bit experts keep every bit of the checkpoint, and compute what
its authors' libraries say that those bits mean.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.packed_reads import part_of
from cases.rank_helpers import VOCAB, count, make_rank, make_samples
from cases.tiny_configs import GPT_OSS_MXFP4, KIMI_INT4, PACKED
from cases.tiny_models import (
    SpreadReader,
    hf_logits,
    hf_model,
    logits_of,
    make_decoder,
    packed,
    probe_loss,
    relative_error,
    trainer_config,
)
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slipstream.conf.architecture.families import read_config
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import AlgorithmConfig, DType, LoraConfig, MlaNormEps, Objective, OptimConfig, OptimState
from slipstream.trainer.adapter_io import save_adapter
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.errors import CheckpointError, LayoutError
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.parallel import ParallelLayout
from slipstream.trainer.weights.loading import CheckpointReader, RandomReader, load_weights
from slipstream.trainer.weights.packed_experts import packed_tensors
from slipstream.weight_sync.layout import Region

MODELS = {"int4": KIMI_INT4, "mxfp4": GPT_OSS_MXFP4}


def plain(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The same model with float experts."""
    return {key: value for key, value in hf_config.items() if key != "quantization_config"}


def stored(hf_config: dict[str, Any], name: str) -> Tensor:
    """One whole tensor of the packed checkpoint."""
    spec = read_config(hf_config)
    (shape,) = (meta.shape for meta in spec.checkpoint_tensors("float32") if meta.name == name)
    return SpreadReader(spec).read(name, Region((0,) * len(shape), shape))


def by_compressed_tensors(hf_config: dict[str, Any], name: str, dtype: torch.dtype) -> Tensor:
    """compressed_tensors' own dequantization, in the dtype of the scales it is given."""
    scheme = QuantizationScheme(**PACKED["config_groups"]["group_0"])
    data = {f"weight_{leaf}": stored(hf_config, f"{name}_{leaf}") for leaf in ("packed", "scale", "shape")}
    data["weight_scale"] = data["weight_scale"].to(dtype)
    return PackedQuantizationCompressor.decompress(data, scheme)["weight"]


def by_transformers(hf_config: dict[str, Any], name: str, dtype: torch.dtype) -> Tensor:
    """transformers' own dequantization, transposed as it keeps gpt-oss."""
    blocks, scales = stored(hf_config, f"{name}_blocks"), stored(hf_config, f"{name}_scales")
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)


ORACLES = {"int4": by_compressed_tensors, "mxfp4": by_transformers}


class DequantizedReader:
    """SpreadReader's packed checkpoint as a float one, through the oracle."""

    def __init__(self, kind: str) -> None:
        self._config, self._oracle = MODELS[kind], ORACLES[kind]
        self._other = SpreadReader(read_config(self._config))

    def names(self) -> None:
        """Any."""
        return

    def read(self, tensor: str, region: Region) -> Tensor:
        if ".experts." not in tensor or tensor.endswith("_bias"):
            return self._other.read(tensor, region)
        whole = self._oracle(self._config, tensor, torch.float32)
        return part_of(whole, region)


def results(decoder: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    batch = packed()
    logits = logits_of(decoder, batch)
    probe_loss(logits, batch[0]).backward()
    return logits, {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_adapter_gradients_are_those_of_the_dequantized_model(kind):
    mine, floats = make_decoder(MODELS[kind]), make_decoder(plain(MODELS[kind]), reader=DequantizedReader(kind))
    (logits, grads), (expected, expected_grads) = results(mine), results(floats)
    assert relative_error(logits, expected) < 1e-5
    assert grads.keys() == expected_grads.keys()
    assert any(".experts." in name for name in grads)
    errors = {name: relative_error(grads[name], expected_grads[name]) for name in grads}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("kind", MODELS)
def test_peft_and_transformers_reproduce_the_logits_from_the_saved_adapter(kind, tmp_path):
    decoder, batch = make_decoder(MODELS[kind], mla_norm_eps=MlaNormEps.hf), packed()
    save_adapter(decoder, tmp_path)
    base = plain(MODELS[kind]) | ({"model_type": "deepseek_v3"} if kind == "int4" else {})
    model = hf_model(base, reader=DequantizedReader(kind))
    without = hf_logits(model, batch)
    adapted = hf_logits(PeftModel.from_pretrained(model, str(tmp_path)), batch)
    assert relative_error(logits_of(decoder, batch), adapted) < 1e-5
    assert relative_error(without, adapted) > 1e-2


def test_unpacked_weights_are_bitwise_what_the_oracles_say():
    for kind, hf_config in MODELS.items():
        decoder = make_decoder(hf_config, dtype=torch.bfloat16)
        layers: Any = decoder.model.layers
        bank = layers[-1].mlp.experts
        gate_up, down = (torch.empty(bank.packed.shapes[n], dtype=torch.bfloat16) for n in ("gate_up", "down"))
        bank.packed.unpack(gate_up, down)
        prefix = f"model.layers.{decoder.spec.num_layers - 1}.mlp.experts."
        oracle = ORACLES[kind]
        if kind == "mxfp4":
            wanted = oracle(hf_config, f"{prefix}gate_up_proj", torch.bfloat16).transpose(1, 2)
            wanted = torch.cat((wanted[:, 0::2], wanted[:, 1::2]), 1)
            wanted_down = oracle(hf_config, f"{prefix}down_proj", torch.bfloat16).transpose(1, 2)
        else:
            gate, up, wanted_down = (
                torch.stack([oracle(hf_config, f"{prefix}{e}.{leaf}_proj.weight", torch.bfloat16) for e in range(8)])
                for leaf in ("gate", "up", "down")
            )
            wanted = torch.cat((gate, up), 1)
        assert torch.equal(gate_up, wanted), kind
        assert torch.equal(down, wanted_down), kind


def write_checkpoint(folder, hf_config: dict[str, Any], **changes: Tensor) -> ModelSpec:
    spec = read_config(hf_config)
    reader = SpreadReader(spec)
    tensors = {
        m.name: reader.read(m.name, Region((0,) * len(m.shape), m.shape)).contiguous()
        for m in spec.checkpoint_tensors("float32")
    }
    save_file(tensors | changes, folder / "model.safetensors")
    return spec


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ep_rank", [0, 1])
def test_every_rank_loads_its_experts_bit_by_bit(kind, ep_rank, tmp_path):
    spec = write_checkpoint(tmp_path, MODELS[kind])
    layout = ParallelLayout(2, 2, ep_rank, torch.device("cpu"), None, None, None)
    config = trainer_config(num_ranks=2, ep_size=2)
    decoder = build_decoder(spec, dtype=torch.bfloat16, device="cpu", trainer=config, layout=layout)
    report = load_weights(decoder, CheckpointReader(tmp_path, spec), seed=3)
    assert report.ignored == ()
    held = [one for one in packed_tensors(decoder) if not one.is_fact]
    assert report.num_packed_bytes == sum(b.numel() * b.element_size() for b in decoder.buffers())
    plain = [p.numel() * p.element_size() for name, p in decoder.named_parameters() if "lora_" not in name]
    assert report.num_bytes == report.num_packed_bytes + sum(plain)
    for one in held:
        wanted = part_of(stored(MODELS[kind], one.tensor), one.region)
        if one.takes_turns:
            wanted = torch.cat((wanted[:, 0::2], wanted[:, 1::2]), 1)
        assert torch.equal(one.into.view(torch.uint8), wanted.contiguous().view(torch.uint8)), one.tensor
    assert {one.region.start[0] for one in held} == ({4 * ep_rank} if kind == "mxfp4" else {0})
    # to_empty, state_dict and back: the bits again
    other = build_decoder(spec, dtype=torch.bfloat16, device="cpu", trainer=config, layout=layout)
    other.load_state_dict(decoder.state_dict())
    for mine, theirs in zip(decoder.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_other_bits_than_the_models_are_refused_by_name(tmp_path):
    prefix = "model.layers.1.mlp.experts.3.up_proj.weight"
    scale, bits = (stored(KIMI_INT4, f"{prefix}_{leaf}") for leaf in ("scale", "packed"))
    kept = "packed experts are kept bit by bit"
    for change, message in (
        ({f"{prefix}_scale": scale.float()}, rf"{prefix}_scale is stored as torch.float32; {kept}, as torch.bfloat16"),
        ({f"{prefix}_scale": scale.half()}, rf"{prefix}_scale is stored as torch.float16; {kept}, as torch.bfloat16"),
        ({f"{prefix}_packed": bits.float()}, rf"{prefix}_packed is stored as torch.float32; {kept}, as torch.int32"),
        ({f"{prefix}_shape": torch.tensor([32, 32])}, rf"{prefix}_shape says \[32, 32\], the model needs \[32, 64\]"),
    ):
        spec = write_checkpoint(tmp_path, KIMI_INT4, **change)
        decoder = build_decoder(spec, dtype=torch.float32, device="cpu", trainer=trainer_config())
        with pytest.raises(CheckpointError, match=message):
            load_weights(decoder, CheckpointReader(tmp_path, spec), seed=3)


@pytest.mark.parametrize(("kind", "least"), [("int4", 0.97), ("mxfp4", 0.75)])
def test_random_bits_have_the_declared_spread(kind: str, least: float):
    """Scales of INT4 are any: within 3 %. Those of MXFP4 are two powers of two, of which half are half as large: their
    root mean square is sqrt(5 / 8) = 0.79 of the larger one."""
    decoder, std = make_decoder(MODELS[kind], dtype=torch.bfloat16), 2.93 * 2**-6
    load_weights(decoder, RandomReader(decoder.spec, seed=1, std=std, device="cpu"), seed=1)
    layers: Any = decoder.model.layers
    bank = layers[-1].mlp.experts
    gate_up, down = (torch.empty(bank.packed.shapes[n], dtype=torch.bfloat16) for n in ("gate_up", "down"))
    bank.packed.unpack(gate_up, down)
    for values in (gate_up, down):
        spread = float(values.double().square().mean().sqrt()) / std
        assert least < spread < least + 0.09, spread
        assert len({tuple(expert.flatten()[:50].tolist()) for expert in values}) == len(values), "no expert is another"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("objective", [Objective.policy, Objective.sft])
def test_a_rank_trains_packed_experts_and_publishes_nothing_merged(kind, objective, tmp_path):
    hf_config = {**MODELS[kind], "vocab_size": VOCAB}
    algorithm = AlgorithmConfig(objective=objective)
    rank = make_rank(hf_config=hf_config, algorithm=algorithm, dtype=DType.bfloat16, lora_dtype=DType.bfloat16,
                     optim=OptimConfig(lr=1e-2, state=OptimState.int8))  # fmt: skip
    samples = make_samples()
    buffers = list(rank.decoder.buffers())
    bits = [buffer.clone() for buffer in buffers]
    losses = []
    for version in range(4):
        batch = [replace(sample, oldest_version=version) for sample in samples]
        stats = rank.forward_backward([batch], count(batch, version))
        losses.append(stats.sums["loss/total_sum"])
        assert rank.optimizer_step().is_finite
    if objective is Objective.sft:
        assert losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(bits, buffers, strict=True))
    rank.states.save_adapter(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"packed experts is not written merged: .* save the adapter"):
        rank.states.save_merged(tmp_path / "merged")
    with pytest.raises(LayoutError, match="packed experts cannot be written into engines"):
        rank.delivery.connect([])


def test_adapters_beside_packed_experts_have_the_names_and_shapes_of_those_beside_plain_ones():
    """Engines load the packed base themselves, and a publish carries these."""
    lora = LoraConfig(rank=4, targets=("mlp", "experts"))
    packed_source, plain_source = (
        AdapterSource(make_decoder(config, trainer_config(lora=lora)), 0, lora)
        for config in (KIMI_INT4, {**KIMI_INT4, "quantization_config": None})
    )
    assert packed_source.layout() == plain_source.layout()
    assert any(".experts." in meta.name for meta in packed_source.layout().tensors)
