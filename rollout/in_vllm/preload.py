"""What the fork server of an engine imports (fork_server.py): vLLM, as the EngineCore process needs it.

This module acts when it is imported, in that server alone. The server ends with the rollout worker, also while it
imports.
"""

from __future__ import annotations

import os
from importlib import import_module

from rollout.die_with_owner import OWNER_VARIABLE, end_with
from weight_sync.gc_freeze import frozen_imports

end_with(int(os.environ[OWNER_VARIABLE]))
with frozen_imports():
    import_module("vllm.v1.engine.core")
    is_cpu = import_module("vllm.platforms").current_platform.is_cpu()
    import_module("vllm.v1.worker.cpu_worker" if is_cpu else "vllm.v1.worker.gpu_worker")
