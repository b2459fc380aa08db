"""What the fork server of an engine imports (fork_server.py): vLLM, as the EngineCore process needs it, with the
patches that belong to a process rather than to an engine.

This module acts when it is imported, in that server alone. The server ends with the rollout worker, also while it
imports.
"""

from __future__ import annotations

import os

from rollout.die_with_owner import OWNER_VARIABLE, end_with
from rollout.in_vllm.process_imports import import_vllm
from rollout.in_vllm.vllm_patches import send_logprobs_together

end_with(int(os.environ[OWNER_VARIABLE]))
import_vllm()
send_logprobs_together()
