"""A worker's engine is forked from a process that imported vLLM meanwhile, and ends with it as a spawned one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from cases.only_compiles import OnlyCompiles, double_kernel
from cases.tiny_models import DENSE
from cases.vllm_process import import_path
from triton import knobs
from triton.runtime import driver

from conf.schema import Device, DType
from orchestrator.inputs.model_folder import engine_checkpoint
from rollout.in_vllm.compiled_in_forks import begin_to_compile, compile_all, kernels_asked_for
from rollout.in_vllm.fork_server import ForkContext, call_in_fork
from rollout.layouts.offline_layout import request_text

TIMEOUT_S = 240.0
WORKER = """
import asyncio, json, os, sys, time
os.environ["VLLM_CACHE_ROOT"] = sys.argv[1] + "/cache"  # vLLM keeps there what it found out about a model's class
from pathlib import Path

from conf.schema import Device, DType, RolloutConfig, SamplingConfig
from rollout.engine.engine import Engine
from rollout.layouts.beside_start import LayoutBesideStart
from weight_sync.record.layout_wire import layouts_digest
from weight_sync.replica.messages import EngineRank
from weight_sync.typed_msgpack import unpack

TENSORS = json.loads(Path(sys.argv[1], "request.json").read_text())["tensors"]

async def prepared(tp_size=1):
    sampling = SamplingConfig(max_tokens=8)
    config = RolloutConfig(tp_size=tp_size, max_model_len=64, kv_cache_bytes=64 << 20, sampling=sampling)
    engine = Engine(Path(sys.argv[1]), config, dtype=DType.float32, device=Device.cpu, seed=0)
    await engine.prepare()
    return engine

async def started(engine):
    from vllm.model_executor.models import registry
    registry._SUBPROCESS_COMMAND = ["false"]  # vLLM's own way to ask the class
    await engine.start()
    return engine

async def layout_was_foreseen(engine, beside):
    # whether the engine's layout is the one that was recorded while it started
    for _ in range(600):
        if not beside.digests():
            time.sleep(0.1)
    (reply,) = await engine.call_ranks("slipstream_describe", TENSORS, "tcp", "127.0.0.1", 5.0)
    return beside.digests() == [layouts_digest((unpack(EngineRank, reply).layout,))]

async def main():
    first = await prepared()
    beside = LayoutBesideStart(Path(sys.argv[1], "request.json").read_text())
    engines = [await started(first), await started(await prepared(tp_size=2))]
    foreseen = await layout_was_foreseen(engines[0], beside)
    os.environ["VLLM_LOGGING_PREFIX"] = "third: "
    engines.append(await started(await prepared()))
    told = [os.getpid()]
    for engine in engines:
        (rollout,) = await engine.generate_group([1, 2, 3], 1, SamplingConfig(max_tokens=5, stop_at_eos=False))
        told.append(len(rollout.token_ids))
    print("\\ntold:", *told, foreseen, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def environment_of_a_child(file: Path) -> None:
    file.write_text(json.dumps(dict(os.environ)))


def one() -> int:
    return 1


def fail() -> None:
    raise ValueError("no such class")


def end() -> None:
    os._exit(3)


def test_engines_are_forked_but_one_in_another_environment_and_all_end_with_the_worker(tmp_path: Path) -> None:
    """The layout of the first is recorded beside its start, and is the one that it has. The second has two ranks."""
    config = DENSE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    request = request_text(
        config, engine_checkpoint(config, DType.float32), tp_size=1, enable_expert_parallel=False, dtype=DType.float32,
        device=Device.cpu, every_layer=True,
    )  # fmt: skip
    (tmp_path / "request.json").write_text(request)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environ = {**os.environ, "PYTHONPATH": import_path()}
    with subprocess.Popen([sys.executable, script, tmp_path], env=environ, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout
            told = next((line for line in worker.stdout if line.startswith("told:")), "told: 0").split()[1:]
            tree = psutil.Process(worker.pid).children(recursive=True)
            servers = [one for one in psutil.Process(worker.pid).children() if "forkserver" in " ".join(one.cmdline())]
            engines = [process for process in tree if process.memory_info().rss > 200 << 20 and process not in servers]
            forked = [engine.ppid() == server.pid for engine in engines for server in servers]
        finally:
            worker.kill()
    assert told == [str(worker.pid), "5", "5", "5", "True"]
    assert sorted(forked) == [False, True, True, True, True]
    _, alive = psutil.wait_procs(tree, timeout=TIMEOUT_S)
    assert not alive


def test_a_forked_process_has_the_environment_in_which_it_was_made(tmp_path: Path) -> None:
    context = ForkContext()
    os.environ["SET_BEFORE"] = "1"
    try:
        first = context.Process(target=environment_of_a_child, args=(tmp_path / "first",))
        first.start()  # the server starts here
        del os.environ["SET_BEFORE"]
        os.environ["SET_LATER"] = "1"
        second = context.Process(target=environment_of_a_child, args=(tmp_path / "second",))
        second.start()
    finally:
        os.environ.pop("SET_BEFORE", None)
        os.environ.pop("SET_LATER", None)
    for process in (first, second):
        process.join(TIMEOUT_S)
    assert json.loads((tmp_path / "first").read_text())["SET_BEFORE"] == "1"
    seen = json.loads((tmp_path / "second").read_text())
    assert (seen.get("SET_BEFORE"), seen.get("SET_LATER")) == (None, "1")


def test_a_call_in_a_forked_process_returns_or_raises_or_says_how_the_process_ended() -> None:
    assert call_in_fork(one) == 1
    with pytest.raises(RuntimeError, match="ValueError: no such class"):
        call_in_fork(fail)
    with pytest.raises(RuntimeError, match="exit code 3"):
        call_in_fork(end)


def test_a_forked_process_compiles_a_kernel_into_the_cache_of_who_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[bool] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", OnlyCompiles())
    with kernels_asked_for({"double_kernel"}) as asked:
        double_kernel[(1,)](torch.zeros(64), 64)
    begin_to_compile(asked)
    for thread in threading.enumerate():
        if thread.name.startswith("waits for kernels"):
            thread.join(TIMEOUT_S)
    assert list(tmp_path.rglob("double_kernel.cubin"))
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    compile_all(asked)
    assert hits == [True]
