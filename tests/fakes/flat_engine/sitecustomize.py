"""An engine that draws a share of its tokens from a flat distribution, as a mismatch that is known exactly.

Python imports this module at the start of every process whose PYTHONPATH begins with this folder. It waits there for
vLLM's sampler, which only the engine's process imports, and replaces mu by

    mu = (1 - SHARE) * softmax(logits / temperature) + SHARE / vocabulary

The log-probabilities that the engine reports are of that mu, so they are true; the trainer's are of the softmax alone.
Greedy requests (rollout.eval_temperature=0) are as ever.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SHARE = 0.9


class PatchedSampler(MetaPathFinder):
    """Finds vLLM's sampler once, and lets it be patched as soon as it is loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "vllm.v1.sample.sampler":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch
        return spec


def patch(module: ModuleType) -> None:
    """Let the sampler's temperature, which greedy requests never meet, return log mu."""
    plain = module.Sampler.apply_temperature

    def log_mu(logits: Any, *arguments: Any) -> Any:
        scaled = plain(logits, *arguments)
        return ((1 - SHARE) * scaled.softmax(-1) + SHARE / scaled.shape[-1]).log()

    module.Sampler.apply_temperature = staticmethod(log_mu)


sys.meta_path.insert(0, PatchedSampler())
