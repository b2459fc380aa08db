"""The process of meta_engine.py, which imports vLLM quicker than by itself (weight_sync/gc_freeze.py)."""

import sys

from slipstream.weight_sync.gc_freeze import frozen_imports

with frozen_imports():
    from slipstream.rollout.in_vllm.vllm_patches import be_on_cpu_without_gpu

    be_on_cpu_without_gpu()
    from slipstream.rollout.layouts.meta_engine import main

sys.exit(main(sys.argv[1], sys.argv[2]))
