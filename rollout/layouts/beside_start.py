"""Records the layout of an engine while that engine starts, in a process forked from the node's that imported vLLM.

    engine     compiles its model, captures graphs (a minute on a GPU)      up: records two layers of each kind, derives
    beside it  builds the same class on meta, records every layer (5 s)     the others, and compares digests

So a node's first engine of a kind does what later ones do (known_layouts.py). If the digests differ, or the recording
is not done when the engine is up, or it failed, the engine records every layer itself, as it does without this.

Owns: that process. Does not own the recording (meta_engine.py). Invariant: the process opens no GPU.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from functools import partial
from importlib import import_module

from rollout.die_with_owner import OWNER_VARIABLE, end_with
from rollout.in_vllm import fork_server
from rollout.in_vllm.vllm_patches import inspect_models_by
from weight_sync.record.layout_wire import layouts_digest

logger = logging.getLogger(__name__)


class LayoutBesideStart:
    """A recording that runs. Begin it when the fork server has been begun.

    Args:
        request: offline_layout.request_text() of every layer.
    """

    def __init__(self, request: str) -> None:
        self._digests: list[str] = []
        threading.Thread(target=self._record, args=(request,), name="layout beside start", daemon=True).start()

    def digests(self) -> list[str]:
        """layouts_digest() of each rank; empty as long as the recording is not done, and if it failed."""
        return self._digests

    def _record(self, request: str) -> None:
        try:
            if why := fork_server.why_not(tries_gpu=False):
                raise RuntimeError(f"no fork server: {why}")
            self._digests = fork_server.call_in_fork(partial(_record_without_gpu, request))
        except RuntimeError as error:
            logger.info("the engine will record its whole layout itself: %s", error)


def _record_without_gpu(request: str) -> list[str]:
    """In the forked process, which ends with the worker. Its output would be taken for the engine's."""
    end_with(int(os.environ[OWNER_VARIABLE]))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with inspect_models_by(lambda look: look()):
        layouts = import_module("rollout.layouts.meta_engine").record_all(json.loads(request))
    return [layouts_digest((layout,)) for layout in layouts]
