"""Engine arguments, stop tokens, errors by name, and the end of a process with its owner. No vLLM."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases.tiny_configs import GEMMA4

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
from slipstream.rollout.crash_reports import PARENT_VARIABLE
from slipstream.rollout.engine import engine_options
from slipstream.rollout.engine.engine_options import (
    cache_bytes,
    capture_sizes,
    engine_arguments,
    known_arguments,
    warm_up_lengths,
)
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.engine.vllm_process import VllmProcess
from slipstream.rollout.errors import EngineDied, EngineError, UnsupportedWeights, error_class
from slipstream.rollout.types import LANGUAGE_MODEL, AdapterSlotsSpec, EngineOptions, RoutingShape
from slipstream.weight_sync.errors import IntegrityError
from slipstream.weight_sync.layout import TensorMeta


def options(
    config: RolloutConfig | None = None, *, folder: Path | None = None, device: Device = Device.cuda, **more: Any
) -> EngineOptions:
    return EngineOptions(
        folder=folder or Path("m"), config=config or RolloutConfig(), dtype=DType.bfloat16, device=device, **more
    )


def test_a_seed_of_any_size_is_one_that_numpy_takes():
    seeds = (20261122 * 1000, 20261122 * 1000 + 1)  # of the engines of a run whose seed is a date
    given = [engine_arguments(options(device=Device.cpu), seed=seed)["seed"] for seed in seeds]
    assert [np.random.RandomState(seed) for seed in given] and given[0] != given[1]


def test_a_base_that_no_publish_can_write_is_loaded_from_its_folder_for_kernels_that_add_adapters(tmp_path: Path):
    """What of it is a language model beside a tower, by a loader that knows its names."""
    slots = AdapterSlotsSpec(2, 8, ("experts",), ())
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}')
    for base, *wanted in (
        (None, "m", "dummy", "triton", None),
        (Path("kimi"), "kimi", "auto", "marlin", None),
        (tmp_path, "m", LANGUAGE_MODEL, "marlin", {"folder": str(tmp_path)}),
    ):
        arguments = engine_arguments(options(adapters=replace(slots, base=base)), seed=1)
        names = ("model", "load_format", "moe_backend", "model_loader_extra_config")
        assert [arguments.get(name) for name in names] == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"enforce_eager": False, "moe_backend": "triton"}),
        (
            {"config": RolloutConfig(tp_size=2, enable_expert_parallel=True, kv_cache_bytes=123)},
            {"distributed_executor_backend": "mp", "enable_expert_parallel": True, "kv_cache_memory_bytes": 123},
        ),
        (
            {"device": Device.cpu},
            {"enforce_eager": True, "distributed_executor_backend": "uni", "kv_cache_memory_bytes": 256 << 20},
        ),
    ],
    ids=["experts in the checkpoint's order", "two ranks", "eager with a fixed cache"],
)
def test_an_engine_is_given_these_arguments(given: dict[str, Any], wanted: dict[str, Any]):
    """Weights never come from files, and log-probabilities are of the distribution that is sampled."""
    wanted |= {"load_format": "dummy", "logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    assert engine_arguments(options(**given), seed=1).items() >= wanted.items()


def test_linear_attention_computes_by_kernels_that_vllm_brings_and_keeps_its_state_in_float32(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "linear_num_value_heads": 2}')
    wanted = {"gdn_prefill_backend": "triton", "mamba_ssm_cache_dtype": "float32"}
    assert engine_arguments(options(folder=tmp_path), seed=1).items() >= wanted.items()


def test_engines_are_told_the_heads_of_layers_without_a_window_that_transformers_moves(tmp_path: Path, monkeypatch):
    moved = {"global_head_dim": GEMMA4["global_head_dim"], "num_global_key_value_heads": 1}
    of_layer = {"head_dim": GEMMA4["global_head_dim"], "num_key_value_heads": 1}
    written = {key: value for key, value in GEMMA4.items() if key not in moved}
    for config in (GEMMA4, {**written, "per_layer_config": {"1": of_layer, "3": of_layer}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        arguments = engine_arguments(options(folder=tmp_path), seed=1)
        assert arguments["hf_overrides"] == {"allow_global_per_layer_attribute_access": True, **moved}
        assert arguments["attention_backend"] == "TRITON_ATTN", "nothing here compiles other kernels for such heads"
    monkeypatch.setattr(engine_options, "find_spec", lambda name: name)
    arguments = engine_arguments(options(folder=tmp_path), seed=1)
    assert "attention_backend" not in arguments


def test_engines_that_share_a_gpu_take_equal_parts_of_what_one_would_take():
    three = RolloutConfig(num_workers=3, workers_per_gpu=3, gpu_memory_utilization=0.75)
    arguments = engine_arguments(options(three), seed=1)
    assert arguments["gpu_memory_utilization"] == 0.25
    gib, weights = 1 << 30, [TensorMeta("w", (1 << 29,), "bfloat16")]
    # A quarter of 80 GiB, less 1 GiB of weights, two slots of 1 GiB, and 3 GiB for the rest.
    slots = AdapterSlotsSpec(2, 8, ("q_proj",), tuple(weights))
    assert cache_bytes(three, weights, slots, 80 * gib) == (20 - 1 - 2 - 3) * gib
    with pytest.raises(EngineError, match=r"workers_per_gpu=3 leaves no engine a KV cache: of 17\.2 GB.*lower"):
        cache_bytes(three, weights, None, 16 * gib)


def test_there_is_a_graph_for_every_number_of_requests_that_an_engine_may_have():
    for num_seqs in (1, 2, 7, 8, 40, 255, 256, 257, 768, 1024):
        sizes = capture_sizes(num_seqs)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == num_seqs
        assert all(after <= max(2 * before, 8) and after - before <= 64 for before, after in itertools.pairwise(sizes))
        for invariant in (False, True):
            arguments = engine_arguments(
                options(RolloutConfig(max_num_seqs=num_seqs), batch_invariant=invariant), seed=1
            )
            assert arguments["compilation_config"]["cudagraph_capture_sizes"] == sizes
    eager = RolloutConfig(enforce_eager=True)
    assert "compilation_config" not in engine_arguments(options(eager), seed=1)


def test_adapter_engines_capture_graphs_with_adapters_alone():
    """Half as many as vLLM would: all their requests have an adapter."""
    slots = AdapterSlotsSpec(2, 8, ("experts",), ())
    for adapters, eager in itertools.product((None, slots), (False, True)):
        config = RolloutConfig(enforce_eager=eager)
        arguments = engine_arguments(options(config, adapters=adapters), seed=1)
        given = arguments.get("compilation_config", {}).get("cudagraph_specialize_lora")
        assert given is (False if adapters is not None and not eager else None)


def test_a_warm_up_meets_every_batch_size_between_the_captured_and_the_largest():
    # vLLM's tuned kernels for H200 change at the sizes of its table; a batch takes those of the nearest one.
    table = (512, 1024, 1536, 2048, 3072, 4096)
    for captured, largest in ((512, 2047), (512, 8191), (64, 2048), (0, 4096)):
        lengths = warm_up_lengths(captured, largest)
        assert max(lengths) == largest
        assert min(lengths) > captured

        def tuned(size: int) -> int:
            return min(table, key=lambda entry: abs(entry - size))

        kernels = {(tuned(size), size % 2) for size in range(captured + 17, largest + 1)}
        assert kernels == {(tuned(length), length % 2) for length in lengths}
    assert warm_up_lengths(512, 400) == []


def test_errors_of_engine_ranks_keep_their_class():
    assert error_class("IntegrityError") is IntegrityError
    assert error_class("UnsupportedWeights") is UnsupportedWeights
    assert error_class("ConfigError") is ConfigError
    for name in ("SomethingOfVllm", "TYPE_CHECKING", "SlotsBusy ", ""):
        assert error_class(name) is EngineError


async def test_an_engine_that_does_not_run_says_so(engine_of: Callable[..., VllmEngine]):
    engine = engine_of()
    with pytest.raises(EngineError, match="not running"):
        engine.check()
    with pytest.raises(EngineError, match="not running"):
        await engine.resume()
    engine.shutdown()


def test_importing_the_worker_needs_neither_torch_nor_vllm():
    modules = "slipstream.rollout.engine.vllm_engine, slipstream.rollout.rewards.runner"
    code = f"import sys, {modules}; assert not {{'torch', 'vllm'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


GRANDCHILD = """
import os, sys, time
from slipstream.rollout.die_with_owner import end_with
end_with(int(sys.argv[1]), also_kill=[os.getppid()])
print(os.getpid(), flush=True)
exec(sys.argv[2])
"""
BUSY = {
    "asleep": "time.sleep(600)",
    "in native code": "import re; re.match('(a+)+$', 'a' * 100 + 'b')",  # no other thread runs until it has ended
}
CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1], sys.argv[3]])
time.sleep(600)
"""
OWNER = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), *sys.argv[2:]])
time.sleep(600)
"""


def cpu_ticks(pid: int) -> int:
    """Time that a process has spent in user mode: 100 ticks per second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.parametrize("busy", BUSY)
def test_a_process_ends_with_its_owner_and_takes_the_one_in_between_along(busy):
    reader, writer = os.pipe()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, CHILD, GRANDCHILD, BUSY[busy]], stdout=writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as output:
        pid = int(output.readline())
        told = cpu_ticks(pid)
        while busy == "in native code" and cpu_ticks(pid) < told + 20:  # nothing else in it takes so long
            time.sleep(0.01)
        owner.kill()
        owner.wait()
        assert output.read() == b""  # end of file: every process that held the pipe is gone


ENDS = """
import os
from pathlib import Path
from slipstream.rollout.die_with_owner import end_with
end_with({}, also_kill={})
print(Path(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read_text())
"""


def test_a_process_that_ends_by_itself_leaves_no_watcher_behind_and_no_word_of_it():
    code = ENDS.format("os.getppid()", ())
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, timeout=240)
    assert done.stderr == b""
    status = Path(f"/proc/{int(done.stdout)}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        time.sleep(0.01)


def test_a_process_that_is_its_own_owner_ends_alone():
    """An engine's owner may import what its processes import: its parent must live on."""
    code = ENDS.format("os.getpid()", "[os.getppid()]")
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {code!r}], check=True);print('on')"
    done = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["on"]


def test_an_engine_that_hangs_while_a_signal_ends_it_is_gone(
    tmp_path: Path, engine_of: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(PARENT_VARIABLE, str(tmp_path / "rollout-0"))
    engine = engine_of(SimpleNamespace(errored=False), SimpleNamespace(exitcode=None))
    for text in ("", "Fatal Python error: Segmentation fault\n"):  # the second may still be written to
        (tmp_path / "rollout-0-EngineCore.txt").write_text(text)
        engine.check()
    with pytest.raises(EngineDied, match="the engine's process died of SIGSEGV"):
        engine.check()


class Silent:
    """vLLM that never answers, and has not noticed that its process dies at the first call."""

    errored = False
    output_processor = SimpleNamespace(external_req_ids={})

    def __init__(self) -> None:
        self.process = SimpleNamespace(exitcode=None)

    async def collective_rpc(self, *_: object, **__: object) -> None:
        self.process.exitcode = -signal.SIGSEGV
        await asyncio.Event().wait()

    async def generate(self, *_: object, **__: object):
        await self.collective_rpc()
        yield None


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.call_ranks("slipstream_describe"),  # its deadline may be minutes away
        lambda engine: engine.generate_group([1, 2], 2, SamplingConfig(max_tokens=4)),
        lambda engine: engine.score([1, 2]),
        lambda engine: engine.next_logprobs([1, 2], None),
    ],
)
def test_what_was_asked_ends_when_the_engine_dies_without_a_word_of_vllms(
    ask: Callable[[VllmEngine], Coroutine[Any, Any, object]],
    engine_of: Callable[..., VllmEngine],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("slipstream.rollout.engine.vllm_process.LOOK_EVERY_S", 0.01)
    llm = Silent()
    with pytest.raises(EngineDied, match="was ended by SIGSEGV; this rollout worker must be restarted"):
        asyncio.run(ask(engine_of(llm, llm.process)))


def test_options_of_the_engine_are_handed_on_and_added_to_ours():
    given = {"block_size": 32, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    config = RolloutConfig(engine_options=given)
    found = engine_arguments(options(config), seed=1)
    assert found["block_size"] == 32
    assert found["compilation_config"].keys() == {"cudagraph_capture_sizes", "cudagraph_mode"}
    assert "block_size" in (known_arguments() or {"block_size"})


@pytest.mark.parametrize("device", [Device.cpu, Device.cuda])
def test_what_we_set_is_refused_as_an_option_of_the_engine(device: Device):
    """But for what may be set without harm."""
    slots = AdapterSlotsSpec(2, 8, ("experts",), ())
    ours = engine_arguments(options(device=device, adapters=slots, routing=RoutingShape((0,), 2, 8)), seed=1)
    harmless = {"attention_backend", "compilation_config", "disable_log_stats", "enable_prefix_caching"}
    for name in ours.keys() - harmless:
        with pytest.raises(ConfigError, match=name):
            RolloutConfig(engine_options={name: 1})
    RolloutConfig(engine_options={name: {} for name in harmless})


async def test_an_engine_goes_at_its_shutdown_although_a_library_keeps_a_frame_of_its_start() -> None:
    kept: list[FrameType] = []

    class Llm:
        engine_core = SimpleNamespace()

        def shutdown(self, timeout: float) -> None: ...

    def make(_: dict[str, Any]) -> Any:
        kept.append(sys._getframe())
        return Llm()

    process = VllmProcess({}, Device.cpu, batch_invariant=False, make=make)
    await process.start()
    engine = weakref.ref(process.llm)
    process.shutdown()
    assert engine() is None
