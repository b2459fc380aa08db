"""Importing vLLM opens no GPU, so that what the fork server forks can use one; and the server says where it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.conf.schema import Device
from slipstream.rollout.engine.engine_options import engine_environment

ASK = """
import os, socket, sys
from slipstream.rollout.in_vllm import fork_server

fork_server.begin(fork_server.imports_read(os.environ), also=sys.argv[1:])
ours, theirs = socket.socketpair()
try:
    process = fork_server.fork("uses_gpu:use_gpu", theirs)
except fork_server.CannotFork as why:
    assert sys.argv[1:] and str(why) == "what it forks cannot use the GPU", why
else:
    assert not sys.argv[1:]
    assert process.wait(120) == 0
"""
USES = """
from slipstream.rollout.in_vllm.process_imports import forks_can_use_gpu

def use_gpu(connection):
    import torch
    assert forks_can_use_gpu()
    assert torch.ones(1, device="cuda").item() == 1
    assert not forks_can_use_gpu()
"""
OPENS = {
    "by_torch": "import torch; torch.ones(1, device='cuda')",
    "by_driver": "import ctypes; assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0",
}
"""Modules that open a GPU when they are imported."""


@pytest.mark.parametrize("also", [(), ("by_torch",), ("by_driver",)], ids=["vllm alone", *OPENS])
def test_what_is_forked_after_the_imports_can_use_the_gpu_unless_one_of_them_did(
    tmp_path: Path, also: tuple[str, ...]
) -> None:
    for name, text in (OPENS | {"uses_gpu": USES}).items():
        (tmp_path / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | engine_environment(Device.cuda) | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", ASK, *also], env=environment, check=True, timeout=180)
