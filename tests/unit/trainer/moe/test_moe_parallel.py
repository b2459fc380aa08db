"""Promise of trainer/parallel.py and trainer/moe: nothing depends on how ranks share the model.

Each world is spawned once; its tests read the results.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.packed_reads import part_of
from cases.parallel_worker import Scenario, reference, run_ranks
from cases.tiny_configs import DEEPSEEK, DEEPSEEK_V32, DENSE, GPT_OSS, GPT_OSS_MXFP4, KIMI_INT4, MIXED, MOE
from cases.tiny_models import AS_TRANSFORMERS, relative_error
from safetensors.torch import load_file

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import TrainMode
from slipstream.trainer.weights.loading import CheckpointReader
from slipstream.weight_sync.layout import Region

pytestmark = pytest.mark.timeout(1200)
"""The first test spawns the worlds: 200 s on two cores that have five times as much to do."""
UNEVEN = {**MIXED, "num_experts": 7, "vocab_size": 97, "tie_word_embeddings": True}
"""Rows and local experts that no rank count divides; one table for embedding and head."""

WORLD_2 = [
    Scenario("lora_ep1", 1, ((0, 1), (2, 3))),
    Scenario("lora_ep2", 2, ((0, 1), (2, 3))),
    Scenario("lora_ep2_keeping_activations", 2, ((0, 1), (2, 3)), checkpointing=False),
    Scenario("lora_ep1_bfloat16", 1, ((0, 1), (2, 3)), dtype=torch.bfloat16),
    Scenario("lora_ep2_bfloat16", 2, ((0, 1), (2, 3)), dtype=torch.bfloat16),
    Scenario("full_ep1", 1, ((0, 1), (2, 3)), mode=TrainMode.full, hf_config=UNEVEN),
    Scenario("full_ep2", 2, ((0, 1), (2, 3)), mode=TrainMode.full, hf_config=UNEVEN),
    Scenario("dense_full", 1, ((0, 1), (2, 3)), mode=TrainMode.full, hf_config=DENSE),
    Scenario("one_rank_without_tokens_ep1", 1, ((0, 1, 2, 3), ())),
    Scenario("one_rank_without_tokens_ep2", 2, ((), (0, 1, 2, 3))),
    Scenario("as_transformers_ep1", 1, ((0, 1, 2, 3), ()), numerics=AS_TRANSFORMERS),
    Scenario("as_transformers_ep2", 2, ((0, 1, 2, 3), ()), numerics=AS_TRANSFORMERS),
    # One token, two experts: six experts and, in some layer, maybe a whole rank without rows.
    Scenario("full_experts_without_rows_ep2", 2, ((0,), ()), lengths=(1,), mode=TrainMode.full, hf_config=MOE),
    Scenario("deepseek_ep2", 2, ((0, 1), (2, 3)), hf_config=DEEPSEEK_V32),
    Scenario("deepseek_ep1_bfloat16", 1, ((0, 1, 2, 3), ()), hf_config=DEEPSEEK, dtype=torch.bfloat16),
    Scenario("lora_uneven_ep2", 2, ((0, 1), (2, 3)), hf_config=UNEVEN),
    Scenario("gpt_oss_ep2", 2, ((0, 1), (2, 3)), hf_config=GPT_OSS),
    Scenario("gpt_oss_full_ep1", 1, ((0, 1, 2, 3), ()), mode=TrainMode.full, hf_config=GPT_OSS),
    Scenario("int4_ep2", 2, ((0, 1), (2, 3)), hf_config=KIMI_INT4),
    Scenario("int4_adapters_over_both_ep1", 1, ((0, 1, 2, 3), ()), hf_config=KIMI_INT4),
    Scenario("mxfp4_ep2", 2, ((0, 1), (2, 3)), hf_config=GPT_OSS_MXFP4),
    Scenario("no_tokens_at_all_ep2", 2, ((), ()), lengths=()),
    Scenario("whole_lora_ep1", 1, ((0, 1), (2, 3)), is_whole=True),
    Scenario("whole_lora_ep2", 2, ((0, 1, 2, 3), ()), is_whole=True),
    Scenario("whole_full_ep1", 1, ((0, 1), (2, 3)), mode=TrainMode.full, hf_config=UNEVEN, is_whole=True),
    Scenario("whole_full_ep2", 2, ((0, 1), (2, 3)), mode=TrainMode.full, hf_config=UNEVEN, is_whole=True),
    Scenario("whole_deepseek_full_ep1", 1, ((0, 1), ()), mode=TrainMode.full, hf_config=DEEPSEEK_V32, is_whole=True),
    Scenario("whole_int4_ep2_keeping", 2, ((0, 1), (2, 3)), hf_config=KIMI_INT4, checkpointing=False, is_whole=True),
]
WORLD_4 = [
    Scenario("whole_lora_ep4", 4, ((0,), (1, 2), (), (3,)), is_whole=True),
    Scenario("whole_full_ep2_of_4", 2, ((0,), (1, 2), (), (3,)), mode=TrainMode.full, hf_config=UNEVEN, is_whole=True),
    Scenario("lora_ep2_of_4", 2, ((0,), (1, 2), (), (3,))),
]
FILE_MODELS_2, FILE_MODELS_4 = [(1, MIXED), (2, MIXED)], [(2, UNEVEN), (4, DEEPSEEK), (1, GPT_OSS)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """Results of every rank of a world of 2 and of a world of 4."""
    two, four = tmp_path_factory.mktemp("world2"), tmp_path_factory.mktemp("world4")
    return {2: (two, run_ranks(2, two, WORLD_2, FILE_MODELS_2)), 4: (four, run_ranks(4, four, WORLD_4, FILE_MODELS_4))}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What one rank has of each scenario, by its name."""
    return {scenario.name: reference(scenario) for scenario in WORLD_2 + WORLD_4 if scenario.lengths}


def ranks_of(worlds, scenario: Scenario) -> list[dict[str, Any]]:
    world = 2 if scenario in WORLD_2 else 4
    return [results[scenario.name] for results in worlds[world][1]]


def named(scenarios: list[Scenario]) -> dict[str, Any]:
    return {"argvalues": scenarios, "ids": [scenario.name for scenario in scenarios]}


EXACT = [s for s in WORLD_2 + WORLD_4 if s.dtype is torch.float32 and s.lengths]


@pytest.mark.parametrize("scenario", **named(EXACT))
def test_logits_and_every_gradient_match_one_rank(worlds, alone, scenario):
    """The norm is the sum of local squares, gradients accumulate, and no whole parameter goes stale."""
    ranks, expected = ranks_of(worlds, scenario), alone[scenario.name]
    for name in ("logits", "moved"):
        assert relative_error(torch.cat([r[name] for r in ranks]), expected[name]) < 1e-6, name
    for results in ranks:
        grads = results["grads"]
        assert grads.keys() == expected["grads"].keys()
        errors = {name: relative_error(grads[name], expected["grads"][name]) for name in grads}
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
        assert relative_error(results["squares"], expected["squares"]) < 1e-5
        assert all(torch.equal(results["twice"][name], once * 2) for name, once in grads.items())


def test_outputs_are_bitwise_those_of_one_rank_when_every_product_has_the_same_rows(worlds, alone):
    """All tokens start on one rank, so no matrix product differs: what remains is the order of dispatch and combine,
    which as transformers has it does not depend on ranks."""
    for name in ("one_rank_without_tokens_ep1", "as_transformers_ep1", "as_transformers_ep2"):
        scenario = next(s for s in WORLD_2 if s.name == name)
        logits = torch.cat([results["logits"] for results in ranks_of(worlds, scenario)])
        assert torch.equal(logits, alone[scenario.name]["logits"]), name


def test_recomputation_changes_no_bit_under_fsdp_and_ep(worlds):
    for results in worlds[2][1]:
        on, off = results["lora_ep2"], results["lora_ep2_keeping_activations"]
        assert torch.equal(on["logits"], off["logits"])
        assert all(torch.equal(on["grads"][name], off["grads"][name]) for name in on["grads"])


def test_bfloat16_gradients_stay_near_float32(worlds):
    for results in worlds[2][1]:
        for ep_size in (1, 2):
            wide, narrow = results[f"lora_ep{ep_size}"]["grads"], results[f"lora_ep{ep_size}_bfloat16"]["grads"]
            assert all(grad.dtype is torch.float32 for grad in narrow.values())
            total = relative_error(*(torch.cat([g.flatten() for g in one.values()]) for one in (narrow, wide)))
            assert total < 0.1


def test_a_correction_bias_is_not_rounded_under_fsdp(worlds, alone):
    """In bfloat16 the same products are taken on either layout, so that one token with other experts would show."""
    scenario = next(s for s in WORLD_2 if s.name == "deepseek_ep1_bfloat16")
    logits = torch.cat([results["logits"] for results in ranks_of(worlds, scenario)])
    assert torch.equal(logits, alone[scenario.name]["logits"])


def test_experts_without_rows_get_gradients_of_zeros(worlds):
    scenario = next(s for s in WORLD_2 if s.name == "full_experts_without_rows_ep2")
    for results in ranks_of(worlds, scenario):
        for name, grad in results["grads"].items():
            if ".experts." in name:
                assert int((grad.flatten(1) != 0).any(1).sum()) == MOE["num_experts_per_tok"], name


def test_no_tokens_on_any_rank_gives_gradients_of_zeros(worlds):
    for results in worlds[2][1]:
        assert all(not grad.any() for grad in results["no_tokens_at_all_ep2"]["grads"].values())


CASES = [(2, 1, MIXED), (2, 2, MIXED), (4, 2, UNEVEN), (4, 4, DEEPSEEK), (4, 1, GPT_OSS)]


@pytest.fixture(scope="module")
def single_rank_files(tmp_path_factory) -> dict[str, Path]:
    """Adapter and merged model of one rank, by `key_of` the model."""
    from cases import parallel_worker

    folders = {}
    for hf_config in (MIXED, UNEVEN, DEEPSEEK, GPT_OSS):
        folders[key_of(hf_config)] = tmp_path_factory.mktemp("single")
        parallel_worker.files(folders[key_of(hf_config)], 1, 1, 0, hf_config)
    return folders


def key_of(hf_config: dict[str, Any]) -> str:
    return json.dumps(hf_config, sort_keys=True)


@pytest.mark.parametrize(("world", "ep_size", "hf_config"), CASES)
def test_files_are_bitwise_the_same_for_any_layout(worlds, single_rank_files, world, ep_size, hf_config):
    """Random init, adapter init and both exports at once: the same seeds give the same bytes."""
    for file in ("merged/model.safetensors", "adapter/adapter_model.safetensors"):
        many = load_file(worlds[world][0] / f"world{world}_ep{ep_size}" / file)
        one = load_file(single_rank_files[key_of(hf_config)] / "world1_ep1" / file)
        assert many.keys() == one.keys()
        assert all(torch.equal(many[name], one[name]) for name in one)


@pytest.mark.parametrize(("world", "ep_size", "hf_config"), CASES)
def test_every_rank_gathers_every_sharded_a(worlds, world, ep_size, hf_config):
    adapter = load_file(worlds[world][0] / f"world{world}_ep{ep_size}" / "adapter" / "adapter_model.safetensors")
    for results in worlds[world][1]:
        gathered = results[f"files_ep{ep_size}"]["gathered_a"]
        assert len(gathered) >= 4
        for name, values in gathered.items():
            assert torch.equal(values, adapter[f"base_model.model.{name}.weight"]), name


@pytest.mark.parametrize(("world", "ep_size", "hf_config"), CASES)
def test_ranks_hold_every_element_once_and_load_their_slices(worlds, world, ep_size, hf_config):
    spec = read_config(hf_config)
    reader = CheckpointReader(worlds[world][0] / f"world{world}_ep{ep_size}" / "merged", spec)
    ranks = [results[f"files_ep{ep_size}"] for results in worlds[world][1]]
    assert all(results["restored"] for results in ranks)
    for meta in spec.checkpoint_tensors("bfloat16"):
        expected = reader.read(meta.name, Region((0,) * len(meta.shape), meta.shape))
        count = torch.zeros(meta.shape)
        for results in ranks:
            if meta.name in results["slices"]:
                region, values = results["slices"][meta.name]
                part_of(count, region).add_(1)
                assert torch.equal(values, part_of(expected, region)), meta.name
        # Vectors are frozen here, and then every rank has them whole.
        assert bool((count == (world if count.dim() == 1 else 1)).all()), meta.name
