"""Importing vLLM opens no GPU, so that what the fork server forks can use one; and the server says where it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.conf.schema import Device
from slipstream.rollout.engine.engine_options import engine_environment

ASK = """
import sys
from slipstream.rollout.in_vllm import fork_server
from uses_gpu import use_gpu

fork_server.begin(also=sys.argv[1:])
why = fork_server.why_not()
assert why == ("what it forks cannot use the GPU" if sys.argv[1:] else ""), why
if not why:
    process = fork_server.ForkContext().Process(target=use_gpu)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
USES = """
from slipstream.rollout.in_vllm.process_imports import forks_can_use_gpu

def use_gpu():
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
