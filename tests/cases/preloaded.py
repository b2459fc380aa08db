"""What the server of rank processes imports (processes.py), without collections of garbage on the way or of it later: a
rank that collects would visit all of it, and so copy it.
"""

from slipstream.weight_sync.gc_freeze import frozen_imports

with frozen_imports():
    import hypothesis
    import torch._dynamo
    import transformers

    from slipstream.trainer import rank

__all__ = ["hypothesis", "rank", "torch", "transformers"]
