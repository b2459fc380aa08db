"""An engine's processes are forked from one that imported vLLM, and end with it; a server that has imported it forks
workers in their own environment.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cases.tiny_configs import DENSE
from cases.vllm_process import import_path

from slipstream.rollout.channel import BlockingChannel
from slipstream.rollout.die_with_owner import OWNER_VARIABLE
from slipstream.rollout.in_vllm import fork_server
from slipstream.rollout.in_vllm.fork_server import CannotFork, Forked

TIMEOUT_S = 240.0
WORKER = """
import asyncio, json, os, sys, time
os.environ["VLLM_CACHE_ROOT"] = sys.argv[1] + "/cache"  # vLLM keeps there what it found out about a model's class
from pathlib import Path

from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.types import EngineOptions

async def main():
    before = dict(os.environ)
    sampling = SamplingConfig(max_tokens=8)
    config = RolloutConfig(tp_size=2, max_model_len=64, kv_cache_bytes=64 << 20, sampling=sampling)
    options = EngineOptions(folder=Path(sys.argv[1]), config=config, dtype=DType.float32, device=Device.cpu)
    engine = VllmEngine(options, seed=0)
    await engine.prepare()
    has_imported = "vllm.v1.worker.cpu_worker" in sys.modules
    from vllm.model_executor.models import registry
    registry._SUBPROCESS_COMMAND = ["false"]  # vLLM's own way to ask the class
    await engine.start()
    unchanged = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == before.get("VLLM_WORKER_MULTIPROC_METHOD")
    (rollout,) = await engine.generate_group([1, 2, 3], 1, SamplingConfig(max_tokens=5, stop_at_eos=False))
    print("\\ntold:", unchanged, has_imported, len(rollout.token_ids), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_engines_and_ranks_are_forked_from_the_worker_and_all_end_with_it(tmp_path: Path) -> None:
    """A process that imported vLLM anew would have another command line."""
    config = DENSE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environ = {**os.environ, "PYTHONPATH": import_path()}
    with subprocess.Popen([sys.executable, script, tmp_path], env=environ, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout
            told = next((line for line in worker.stdout if line.startswith("told:")), "told: 0").split()[1:]
            tree = psutil.Process(worker.pid).children(recursive=True)
            titles = [" ".join(process.cmdline()) for process in tree]
        finally:
            worker.kill()
    assert told == ["True", "True", "5"], "each engine would import more of vLLM"
    assert sum("spawn_main" in title or "fork_server" in title for title in titles) == 0
    assert sum("VLLM::EngineCore" in title for title in titles) == 1
    assert sum("VLLM::Worker" in title for title in titles) == 2
    _, alive = psutil.wait_procs(tree, timeout=TIMEOUT_S)
    assert not alive


SERVER = """
import os, sys
from slipstream.rollout.in_vllm import fork_server, process_imports

def asked():
    with open(sys.argv[2], "a") as file:
        print(os.getpid(), file=file)
    return True

process_imports.num_gpus, process_imports.can_use_gpu = (lambda: 1), asked
fork_server.import_vllm = lambda: None
fork_server.serve(int(sys.argv[1]), [])
"""


def test_a_forked_process_has_the_environment_in_which_it_was_asked_for_and_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server imports nothing here. And whether a GPU can be used is asked of another process than the one that is
    to fork an engine: whoever has counted GPUs cannot.
    """
    monkeypatch.setenv("SET_BEFORE", "1")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "server"))
    listener.listen()
    environ = {**os.environ, "PYTHONPATH": import_path(), OWNER_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-c", SERVER, str(listener.fileno()), str(tmp_path / "asked")]
    monkeypatch.setattr(fork_server, "_server", fork_server._Server())
    fork_server.join(str(tmp_path / "server"))
    with subprocess.Popen(command, env=environ, pass_fds=(listener.fileno(),)) as server, contextlib.ExitStack() as end:
        end.callback(server.kill)
        listener.close()
        monkeypatch.setenv("PYTHONPATH", import_path())
        first, written = ask()
        assert written["SET_BEFORE"] == "1"
        assert first.wait(TIMEOUT_S) == 0
        counted = (tmp_path / "asked").read_text().split()
        assert len(counted) == 1 and counted != [str(first.pid)]
        monkeypatch.delenv("SET_BEFORE")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("SET_LATER", "1")
        second, written = ask()
        assert (written.get("SET_BEFORE"), written.get("SET_LATER")) == (None, "1")
        assert psutil.Process(second.pid).ppid() == server.pid
        second.kill()
        assert second.wait(TIMEOUT_S) == -9
        monkeypatch.setenv("TORCH_OTHER", "1")
        with pytest.raises(CannotFork, match="changed since its imports: TORCH_OTHER"):
            ask()
    with pytest.raises(CannotFork, match="the fork server is gone"):
        ask()


def ask() -> tuple[Forked, dict[str, str]]:
    """A process that tells its environment, is where this one is, and then ends, or waits where SET_LATER is set."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = fork_server.fork("cases.environment_of_a_child:told_environment", theirs)
    environment, *place = BlockingChannel(ours).receive()
    assert place == [os.getcwd(), sys.path]
    return process, environment
