"""What engine processes import first, and without collections on the way."""

from __future__ import annotations

import gc
import sys
from multiprocessing.spawn import get_preparation_data

import pytest

from rollout.in_vllm.process_imports import come_first
from weight_sync.gc_freeze import frozen_imports


def test_processes_that_are_spawned_meanwhile_import_vllm_first_and_no_later_ones() -> None:
    before, was_imported = get_preparation_data("later"), "vllm" in sys.modules
    with come_first():
        assert get_preparation_data("engine")["init_main_from_name"] == "rollout.in_vllm.process_imports"
    assert get_preparation_data("later") == before
    assert ("vllm" in sys.modules) == was_imported, "this process does not import it"


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
