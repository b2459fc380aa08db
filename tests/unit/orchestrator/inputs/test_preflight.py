"""A run is judged by its files and by this machine, before anything starts."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.tiny_configs import GPT_OSS, PACKED
from safetensors.numpy import save_file

from slipstream.conf.architecture.families import read_config
from slipstream.conf.checks.model import check_architecture, of_base
from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, Init, RunConfig
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.errors import PreflightError
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.orchestrator.inputs.environment_checks import check_engine_needs, check_packages
from slipstream.orchestrator.inputs.facts import Fact
from slipstream.orchestrator.inputs.machine_checks import check_routes
from slipstream.orchestrator.inputs.object_store import LEAST_BYTES, object_store_bytes
from slipstream.orchestrator.inputs.preflight import (
    PreflightReport,
    _count,
    _join,
    check_evaluation,
    check_initial_adapter,
    check_model,
    check_run_folder,
    check_training,
    run_preflight,
)
from slipstream.orchestrator.inputs.rows.prompt_rows import check_data
from slipstream.orchestrator.machine import Machine


def test_experts_in_turns_are_refused_before_ranks_load_where_engines_merge_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GPT_OSS, "swiglu_limit": 7.0}))
    words = ["experiment=quickstart", "cluster.device=cuda", "model=checkpoint", f"model.path={tmp_path}"]
    words += ["model.tokenizer=characters", "weight_sync.remote_merge=host"]
    with pytest.raises(
        ConfigError, match=r"contradicts trainer.lora.targets with experts for gpt_oss.*remote_merge=none"
    ):
        check_model(load_run_config(words))
    with pytest.raises(ConfigError, match=r"safetensors"):  # the next check
        check_model(load_run_config([*words, "trainer.lora.targets=[attention,mlp]"]))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A whole tiny checkpoint: config, weights, tokenizer."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    hf_config = load_run_config(["experiment=quickstart"]).model.hf_config
    (folder / "config.json").write_text(json.dumps(hf_config))
    tensors = read_config(hf_config).checkpoint_tensors("float32")
    save_file({tensor.name: np.zeros(tensor.shape, np.float32) for tensor in tensors}, folder / "model.safetensors")
    save_character_tokenizer(folder, vocab_size=hf_config["vocab_size"])
    return folder


def words_for(checkpoint: Path, *more: str) -> list[str]:
    """The quick start on a checkpoint from disk."""
    words = ["experiment=quickstart", "model=checkpoint", f"model.path={checkpoint}", "cluster.dashboard=false"]
    return [*words, f"run.dir={checkpoint.parent}/runs", *more]


def facts_of(report: PreflightReport) -> dict[str, str]:
    return {fact.subject: fact.finding for fact in report.facts}


def test_a_whole_checkpoint_passes_and_what_is_done_with_it_is_told(checkpoint: Path) -> None:
    words = ["trainer.lora.rank=4", "trainer.lora.alpha=8", "trainer.optim.lr=1e-4", "algorithm.groups_per_step=3"]
    words += ["rollout.sampling.stop_token_ids=[7]", 'rollout.sampling.stop=["</a>",b]', "algorithm.group_size=5"]
    facts = facts_of(run_preflight(load_run_config(words_for(checkpoint, *words))))
    assert "8 experts (top-2)" in facts["model"]
    assert facts["prompts"].startswith("704 in pkg://letters_train.jsonl")
    assert facts["epochs"] == "0.5, of 234.7 steps"
    step = "3 prompts x 5 responses = 15 responses a step, 110 steps"
    assert facts["training"] == f"LoRA rank 4, alpha 8, lr 0.0001, {step}"
    assert facts["first prompt"].endswith("letters_train.jsonl:1, 5 tokens: '<bos>6d8='")
    assert facts["responses"] == "temperature 1, at most 4 tokens, ended by '</a>', 'b'"
    assert not (checkpoint.parent / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.num_ranks=16", "trainer.ep_size=16"], r"ep_size=16 is more than the model's 8 experts.*1, 2, 4, 8"),
        (["rollout.sampling.stop_token_ids=[3,64]"], "stop_token_ids names token 64, and the model has vocab_size=64"),
        (["rollout.engine_options.block_sise=32"], "block_sise: this vLLM's engine has.*mean block_size"),
        (["cluster.device=auto", "weight_sync.transport=nvlink"], r"transport=nvlink contradicts cluster\.device=cpu"),
        (["model.init=random", "weight_sync.remote_merge=host"], r"host needs model\.path.*got model\.init=random"),
        (["run.keep_best=eval/pass_at_2"], "pass_at_2 is no figure of this run's evaluations. Did you mean eval/"),
    ],
)
def test_what_could_not_run_is_refused(checkpoint: Path, words: list[str], message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        run_preflight(load_run_config(words_for(checkpoint, *words)), Machine(count_gpus=lambda: 0))


NUM_BESIDE = load_run_config(["experiment=quickstart", "run.eval_beside=true"]).num_evaluated_groups
QUICK, SFT = ["experiment=quickstart"], ["experiment=sft_quickstart", "trainer.optim.lr=0.01"]
HARD = [*QUICK, "data.eval_path=null", "data.eval_sets.hard=pkg://letters_heldout.jsonl"]


@pytest.mark.parametrize(
    ("check", "words", "finding"),
    [
        (check_training, [*QUICK, "run.num_steps=0"], "none: run.num_steps=0"),
        (
            check_training, [*QUICK, "trainer.mode=full", "trainer.optim.lr=1e-5", "run.num_steps=1"],
            "all weights, lr 1e-05, 16 prompts x 24 responses = 384 responses a step, 1 step",
        ),
        (
            check_training, [*SFT, "algorithm.sequences_per_step=1", "run.num_steps=2"],
            "LoRA rank 16, alpha 32, lr 0.01, 1 row a step, 2 steps",
        ),
        (
            check_training, [*SFT, "run.num_steps=9", "trainer.optim.warmup_steps=9"],
            "LoRA rank 16, alpha 32, lr 0.01, which a warm-up of 9 updates does not reach, 64 rows a step, 9 steps",
        ),
        (
            check_training, [*SFT, "run.num_steps=15", "trainer.optim.warmup_steps=.1"],
            "LoRA rank 16, alpha 32, lr 0.01 after a warm-up of 2 of 15 updates, 64 rows a step, 15 steps",
        ),
        (check_evaluation, [*QUICK, "data.eval_path=null"], "none: data.eval_path=null"),
        (check_evaluation, QUICK, "1 held-out set, training waits"),
        (
            check_evaluation, [*QUICK, "run.eval_beside=true"],
            f"1 held-out set, beside training, {NUM_BESIDE} prompts at a time",
        ),
        (
            check_evaluation, [*HARD, "run.keep_best=eval/hard/pass_at_1"],
            "1 held-out set (hard), training waits, best by eval/hard/pass_at_1",
        ),
        (check_packages, [*QUICK, "rollout.engine_options.block_size=32"], "present (versions: slipstream doctor)"),
    ],
)  # fmt: skip
def test_what_a_run_does_is_told(check: Callable[[RunConfig], Fact], words: list[str], finding: str) -> None:
    assert check(load_run_config(words)).finding == finding


@pytest.mark.parametrize(
    ("packing", "quantization"),
    [("INT4", {**PACKED, "ignore": ["lm_head", "re:.*self_attn.*"]}), ("MXFP4", {"quant_method": "mxfp4"})],
)
def test_merged_weights_for_packed_engines_are_refused(checkpoint: Path, packing: str, quantization: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    if packing == "MXFP4":
        fields = {"model_type": "gpt_oss", "num_local_experts": config["num_experts"], "rms_norm_eps": 1e-5}
        absent = ("layer_types", "rope_parameters", "attention_bias")
        config = {key: value for key, value in config.items() if key not in absent}
        config |= {**fields, "head_dim": 32, "intermediate_size": 64}
    (checkpoint / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(PreflightError, match=f"{packing} engines accept adapter mode only"):
        run_preflight(load_run_config(words_for(checkpoint)))


def test_engines_load_int4_weights_themselves_where_there_are_some(checkpoint: Path) -> None:
    quantization: dict[str, Any] = {"config_groups": {"all": {"weights": {"num_bits": 4, "type": "int"}}}}
    config = load_run_config(words_for(checkpoint, "weight_sync.mode=adapter"))
    int4 = {"quantization_config": quantization, "hidden_size": 256, "moe_intermediate_size": 64}
    assert list(of_base(config, int4)) == []
    for words, sizes in (((), {"hidden_size": 64}), (("rollout.tp_size=2",), {"moe_intermediate_size": 64})):
        cut = load_run_config(words_for(checkpoint, "weight_sync.mode=adapter", *words))
        assert "of 64 (vLLM's Marlin kernels), got" in next(of_base(cut, {**int4, **sizes}))
    random = replace(config, model=replace(config.model, init=Init.random))
    assert "needs model.path and model.init=checkpoint" in next(of_base(random, int4))
    refused = next(of_base(config, {"quantization_config": {"quant_method": "mxfp4"}}))
    assert refused.startswith("weight_sync.mode=adapter on MXFP4 weights") and "have to load them" in refused


def test_full_training_of_packed_experts_is_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"config_groups": {"all": {"weights": {"num_bits": 4, "type": "int"}}}}
    with pytest.raises(ConfigError, match=r"trainer\.mode=full cannot train INT4 weights"):
        check_architecture(load_run_config(words_for(checkpoint, "trainer.mode=full")), config)


def test_your_own_file_needs_no_other_length_than_the_engines(checkpoint: Path) -> None:
    """`quickstart` with data=files: the letters' data.max_prompt_tokens went with their file."""
    data = checkpoint.parent / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "1" * 60, "answer": "a"}) + "\n")
    with pytest.raises(PreflightError, match=r"61 tokens, data\.max_prompt_tokens allows 60"):
        run_preflight(load_run_config(words_for(checkpoint, "data=files", f"data.path={data}")))


def test_a_kv_cache_too_small_for_one_sequence_is_refused(checkpoint: Path) -> None:
    config = load_run_config(words_for(checkpoint))
    spec = read_config(json.loads((checkpoint / "config.json").read_text()))
    needed = spec.sequence_cache_bytes(64, config.model.dtype.value, 1)
    message = rf"kv_cache_bytes={needed - 1} holds no sequence of rollout\.max_model_len=64 .* takes {needed} bytes"
    with pytest.raises(PreflightError, match=message):
        run_preflight(load_run_config(words_for(checkpoint, f"rollout.kv_cache_bytes={needed - 1}")))
    for enough in (str(needed), "null"):
        run_preflight(load_run_config(words_for(checkpoint, f"rollout.kv_cache_bytes={enough}")))


def test_the_object_store_has_room_for_routes_as_far_as_shared_memory_has(checkpoint: Path) -> None:
    """Two layers, two experts per token and a byte for the mark: 5 bytes. 16 groups of 24 responses, prompts of 36
    and 4 tokens, at staleness 0 two batches at a time: 384 * 40 * 5 * 2 bytes; then 60,000 groups."""
    words = ["data.max_prompt_tokens=36", "rollout.sampling.max_tokens=4"]
    config = load_run_config(words_for(checkpoint, *words))
    large, small = Machine(free_bytes=with_shared_memory(4 << 30)), Machine(free_bytes=with_shared_memory(1 << 30))
    assert check_routes(config, large) is None and object_store_bytes(config, large) == LEAST_BYTES
    config = replace(config, parity=replace(config.parity, replay_routing=True))
    fact = check_routes(config, large)
    assert fact is not None and fact.finding == "recorded and replayed: 5 bytes per token, 0.00 GB at most at a time"
    assert object_store_bytes(config, large) == LEAST_BYTES
    config = replace(config, algorithm=replace(config.algorithm, groups_per_step=60_000))
    fact = check_routes(config, large)
    assert fact is not None and not fact.is_warning
    assert object_store_bytes(config, large) == 60_000 * 24 * 40 * 5 * 2
    fact = check_routes(config, small)
    assert fact is not None and fact.is_warning
    assert "0.58 GB at most at a time, more than the 512 MiB that Ray's object store gets" in fact.finding


@pytest.mark.parametrize(
    ("answers", "words", "said"),
    [
        (["a"], ["rollout.sampling.max_tokens=1"], None),
        (["a"], [], "exactly rollout.sampling.max_tokens=4 tokens, and the answer of row 1 has 1; set it to that, or"),
        ([""], [], "the answer of row 1 has 0; set rollout.sampling.stop_at_eos=true"),
        (["a"], ["rollout.sampling.stop_at_eos=true"], None),
        (
            ["a", "bbbbb"],
            ["rollout.sampling.stop_at_eos=true"],
            "1 of 2 rows: responses have at most rollout.sampling.max_tokens=4 tokens, and the answer of row 2",
        ),
    ],
)
def test_answers_that_no_response_can_equal_are_warned_of(
    tmp_path: Path, answers: list[str], words: list[str], said: str | None
) -> None:
    rows = [{"prompt": "1a=", "answer": answer} for answer in answers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [*("experiment=quickstart", "reward=exact_match", f"data.path={tmp_path}/rows.jsonl"), *words]
    fact = check_data(load_run_config([*given, "data.eval_path=null", "algorithm.groups_per_step=1"]))
    assert fact.is_warning == (said is not None)
    assert said is None or said in fact.finding


def with_shared_memory(num_bytes: int) -> Callable[[Path], int]:
    """A terabyte free everywhere but in /dev/shm."""
    return lambda folder: num_bytes if folder == Path("/dev/shm") else 1 << 40


@pytest.mark.parametrize(("name", "said"), [("absent", "no such folder"), ("", "has no config.json")])
def test_one_cause_is_reported_once(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(PreflightError) as caught:
        run_preflight(load_run_config(words_for(tmp_path / name, "parity.replay_routing=true")))
    assert "problems" not in str(caught.value)
    assert said in str(caught.value)
    with pytest.raises(
        PreflightError, match=rf"2 problems:\n.*{said}.*\n.*data\.path={tmp_path}/gone\.jsonl does not exist"
    ):
        run_preflight(load_run_config(words_for(tmp_path / name, f"data.path={tmp_path}/gone.jsonl")))


def test_device_is_decided_before_rules_about_devices(checkpoint: Path) -> None:
    machine = Machine(count_gpus=lambda: 0)
    assert resolve_device(Device.auto, machine) == "cpu"
    auto = load_run_config(words_for(checkpoint, "cluster.device=auto"))
    assert run_preflight(auto, machine).config.cluster.device is Device.cpu


def test_a_run_folder_has_room_and_can_be_made(tmp_path: Path) -> None:
    config = load_run_config(["experiment=quickstart", f"run.dir={tmp_path}/runs"])
    enough, too_few = (Machine(free_bytes=lambda _, free=free: free) for free in (256 << 20, (256 << 20) - 1))
    assert check_run_folder(config, enough).finding == f"{tmp_path}/runs (0 GB free)"
    with pytest.raises(ConfigError, match=f"^run.dir={tmp_path}/runs has 255 MiB of free space, and a run wants 256;"):
        check_run_folder(config, too_few)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=f"lies below {tmp_path}/runs, which is a file"):
        check_run_folder(config, enough)


def test_numbers_and_problems_in_words() -> None:
    sizes = (12_345, 999_000, 1_000_000, 999_900_000, 1_000_000_000, 30_532_000_000)
    assert [_count(size) for size in sizes] == ["12 k", "999 k", "1.0 M", "999.9 M", "1.0 B", "30.5 B"]
    assert _join(["a", "a"]) == "a"
    assert _join(["b", "a", "b"]) == "2 problems:\n  1. b\n  2. a"


def test_an_adapter_to_start_from_is_needed_again_for_a_reference_alone() -> None:
    words = ["experiment=quickstart", "trainer.lora.init_from=gone"]
    resumed = ["run.resume=runs/latest", *words]
    assert "is not read again" in check_initial_adapter(load_run_config(resumed)).finding
    assert not load_run_config(resumed).reads_initial_adapter
    for needs_it in (words, [*resumed, "algorithm.kl_coef=0.1"]):
        config = load_run_config(needs_it)
        assert config.reads_initial_adapter
        with pytest.raises(ConfigError, match=r"trainer\.lora\.init_from=gone"):
            check_initial_adapter(config)


def test_a_package_that_vllms_file_of_a_family_imports_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_config(["experiment=quickstart", "model=qwen3_5_35b_a3b", "rollout.kv_cache_bytes=null"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM's file of model_type=qwen3_5_moe_text imports torchvision, which this"):
        check_model(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert check_model(config)


def test_engines_whose_kernels_are_compiled_at_their_start_need_headers_and_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_config = {"model_type": "deepseek_v32"}
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"DeepGEMM with its headers .* and nvcc at {tmp_path}/bin/nvcc"):
        check_engine_needs(hf_config, Device.cuda)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    with pytest.raises(ConfigError, match=r"lacks DeepGEMM with its headers \(deep_gemm, or [^)]*\); "):
        check_engine_needs(hf_config, Device.cuda)
    (tmp_path / "deep_gemm" / "include" / "deep_gemm").mkdir(parents=True)
    (tmp_path / "deep_gemm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    check_engine_needs(hf_config, Device.cuda)
    check_engine_needs({"model_type": "deepseek_v3"}, Device.cuda)
