"""What vLLM imports into each process of an engine before it loads the model: the product's worker_extension_cls.

This module acts when it is imported, and no other of the product does: vLLM calls nothing of ours at this point, and
what is done here must come before the model is loaded, or, as the end with the rollout worker, hold while the engine
starts. (vLLM calls its plugins there, but finds them only if the package is installed.)
"""

import multiprocessing
import os

from slipstream.rollout.crash_reports import report_beside_parent
from slipstream.rollout.die_with_owner import OWNER_VARIABLE, end_with
from slipstream.rollout.in_vllm.language_model_loader import register_language_model_loader
from slipstream.rollout.in_vllm.process_imports import know_text_models
from slipstream.rollout.in_vllm.vllm_patches import keep_batch_invariance, keep_linear_weights_in_place
from slipstream.rollout.in_vllm.worker_extension import WeightReceiver

__all__ = ["WeightReceiver"]


keep_linear_weights_in_place()
keep_batch_invariance()
register_language_model_loader()
know_text_models()
# With tp_size > 1 the EngineCore process is in between and watches nobody. Its pid comes from multiprocessing, not from
# getppid(), which names another process once the parent is gone.
owner, parent = int(os.environ.get(OWNER_VARIABLE, "0")), multiprocessing.parent_process()
if owner:
    end_with(owner, also_kill=[parent.pid] if parent and parent.pid and parent.pid != owner else [])
report_beside_parent()
