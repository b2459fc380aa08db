"""What tests of workers, engines and their caches share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.conf.schema import Device, DType, RolloutConfig
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.types import EngineOptions


@pytest.fixture
def node_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this node keeps for later runs, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def engine_of(tmp_path: Path) -> Callable[..., VllmEngine]:
    """Makes an engine on a CPU that has this client of vLLM's, and these processes; without one it does not run."""

    def made(llm: object = None, *processes: object, **given: Any) -> VllmEngine:
        (tmp_path / "config.json").write_text("{}")
        options = EngineOptions(folder=tmp_path, config=RolloutConfig(), dtype=DType.float32, device=Device.cpu)
        engine = VllmEngine(options, seed=0, **given)
        engine.process.llm, engine.process.children = cast(Any, llm), cast(Any, list(processes))
        return engine

    return made
