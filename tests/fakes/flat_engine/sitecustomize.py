"""An engine that draws a share of its tokens from a flat distribution, as a mismatch that is known exactly.

In every process whose PYTHONPATH begins with this folder, vLLM's sampler, which only the engine's process imports,
samples from

    mu = (1 - SHARE) * softmax(logits / temperature) + SHARE / vocabulary

The log-probabilities that the engine reports are of that mu, so they are true; the trainer's are of the softmax alone.
Greedy requests (rollout.eval.temperature=0) are as ever.
"""

from types import ModuleType
from typing import Any

from tests.fakes.on_import import patch_on_import

SHARE = 0.9


def patch(module: ModuleType) -> None:
    """Let the sampler's temperature, which greedy requests never meet, return log mu."""
    plain = module.Sampler.apply_temperature

    def log_mu(logits: Any, *arguments: Any) -> Any:
        scaled = plain(logits, *arguments)
        return ((1 - SHARE) * scaled.softmax(-1) + SHARE / scaled.shape[-1]).log()

    module.Sampler.apply_temperature = staticmethod(log_mu)


patch_on_import("vllm.v1.sample.sampler", patch)
