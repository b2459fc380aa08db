"""What `vllm serve` runs, imported without collections of garbage on the way. A process that it spawns, an engine's,
imports vLLM in the same way, and nothing of the server."""

import runpy
import warnings
from importlib import import_module

from slipstream.rollout.in_vllm.process_imports import import_vllm_as_users_do
from slipstream.weight_sync.gc_freeze import frozen_imports

VLLM_MODULE = "vllm.entrypoints.openai.api_server"

if __name__ == "__main__":
    with frozen_imports():
        import_module(VLLM_MODULE)
    warnings.filterwarnings("ignore", r".*found in sys\.modules", RuntimeWarning)
    runpy.run_module(VLLM_MODULE, run_name="__main__", alter_sys=True)
elif __name__ == "__mp_main__":
    import_vllm_as_users_do()
