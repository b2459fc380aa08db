"""What processes of engines import, without collections on the way and without what opens a GPU."""

import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from threading import Event

import pytest
import torch

from slipstream.rollout.engine.engine_options import METHOD_VARIABLE
from slipstream.rollout.engine.vllm_process import method_here, processes_started_by
from slipstream.rollout.in_vllm import process_imports
from slipstream.rollout.in_vllm.process_imports import forks_can_use_gpu, without_torchao
from slipstream.weight_sync.gc_freeze import frozen_imports


def test_torchao_is_not_found_meanwhile_unless_somebody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    with without_torchao():
        assert find_spec("torchao") is None
        with pytest.raises(ImportError):
            import_module("torchao")
    assert find_spec("torchao") is not None
    monkeypatch.setitem(sys.modules, "torchao", imported := sys)
    with without_torchao():
        assert sys.modules["torchao"] is imported


def test_what_was_imported_is_not_walked_again() -> None:
    num_frozen = gc.get_freeze_count()
    try:
        with frozen_imports():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= num_frozen + len(made)
        with pytest.raises(ImportError), frozen_imports():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("answer", "timeout_s", "can"),
    [(lambda: True, 300.0, True), (lambda: False, 300.0, False), (Event().wait, 0.1, False)],
)
def test_a_fork_that_gives_no_answer_can_use_no_gpu(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[], bool], timeout_s: float, can: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(process_imports, "can_use_gpu", answer)
    monkeypatch.setattr(process_imports, "ANSWER_TIMEOUT_S", timeout_s)
    assert forks_can_use_gpu() is can


@pytest.mark.parametrize("given", [None, "spawn"])
def test_a_start_leaves_the_method_as_it_was_given(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setenv(METHOD_VARIABLE, "spawn")  # as vLLM sets it on CPUs
    with pytest.raises(RuntimeError), processes_started_by("fork", afterwards=given):
        assert os.environ[METHOD_VARIABLE] == "fork"
        raise RuntimeError
    assert os.environ.get(METHOD_VARIABLE) == given


@pytest.mark.parametrize(("num_gpus", "can", "method"), [(0, False, "fork"), (1, True, "fork"), (1, False, "spawn")])
def test_engines_are_forked_unless_no_fork_could_use_a_gpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, can: bool, method: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(process_imports, "can_use_gpu", lambda: can)
    assert method_here() == method
