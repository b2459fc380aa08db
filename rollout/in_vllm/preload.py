"""What a fork server imports (fork_server.py): vLLM, as the EngineCore process needs it, with the
patches that belong to a process rather than to an engine.

This module acts when it is imported, in that server alone. The server ends with the process that began it, also
while it imports.
"""

from __future__ import annotations

import os
import warnings

from rollout.die_with_owner import OWNER_VARIABLE, end_with
from rollout.in_vllm.fork_server import for_ranks
from rollout.in_vllm.process_imports import import_vllm
from rollout.in_vllm.vllm_patches import make_ranks_in, send_logprobs_together

BEFORE = dict(os.environ)
"""Environment in which vLLM was imported."""

end_with(int(os.environ[OWNER_VARIABLE]))
import_vllm()
send_logprobs_together()
make_ranks_in(for_ranks)
# The main module of what is forked is process_imports (come_first), which does nothing where it is imported already.
warnings.filterwarnings("ignore", r".*process_imports' found in sys\.modules", RuntimeWarning)

SET_BY_IMPORTS = {name: value for name, value in os.environ.items() if BEFORE.get(name) != value}
"""Variables that vLLM's imports have set, for the processes that it starts."""
