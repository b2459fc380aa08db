"""What a fork server imports (fork_server.py): vLLM, as worker and EngineCore need it.

This module acts when it is imported, in that server alone. The server ends with the process that began it, also
while it imports.
"""

import os

from slipstream.rollout.die_with_owner import OWNER_VARIABLE, end_with
from slipstream.rollout.in_vllm.process_imports import import_vllm

BEFORE = dict(os.environ)
"""Environment in which vLLM was imported."""

end_with(int(os.environ[OWNER_VARIABLE]))
import_vllm()

SET_BY_IMPORTS = {name: value for name, value in os.environ.items() if BEFORE.get(name) != value}
"""Variables that vLLM's imports have set, for the processes that it starts."""
