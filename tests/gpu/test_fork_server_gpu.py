"""Importing vLLM opens no GPU, so that the process that did it may be forked into engines that use one."""

from __future__ import annotations

import os
import subprocess
import sys

from conf.schema import Device
from rollout.engine.engine_options import engine_environment

IMPORT_AND_FORK = """
import os
from rollout.in_vllm.process_imports import import_vllm
import_vllm()
import torch
assert not torch.cuda.is_initialized()
if (child := os.fork()) == 0:
    os._exit(int(torch.ones(1, device="cuda").item() != 1))
assert os.waitpid(child, 0)[1] == 0
"""


def test_what_is_forked_after_the_import_can_use_the_gpu() -> None:
    environment = os.environ | engine_environment(Device.cuda)
    subprocess.run([sys.executable, "-c", IMPORT_AND_FORK], env=environment, check=True, timeout=120)
