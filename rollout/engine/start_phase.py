"""Says what an engine that starts is doing, from what its processes have written.

Owns: which line of vLLM's log begins which phase. Each line is one that 0.25.1 and 0.32 both write at their default
level; where the log is silent (VLLM_LOGGING_LEVEL=WARNING) the phase stays `CONFIG`. Does not own: the files
(start_failure.OutputSince), nor what the worker does before and after (worker.py).
"""

IMPORTING = "importing vLLM"
"""Before the engine is started."""
CONFIG = "reading the model's config"
"""Before vLLM's first line: the model's class is imported, too."""
_BEGINS_WITH = (
    ("Resolved architecture", "starting the engine's process"),
    ("Initializing a V1 LLM engine", "preparing the device"),
    ("Starting to load model", "building the model"),
    ("Model loading took", "compiling, and measuring memory"),
    ("Available KV cache memory", "warming up kernels and capturing CUDA graphs"),
    ("init engine (profile", "answering"),
)
"""(words of a line, the phase that begins with it), in the order in which a start comes to them."""


def phase_in(log: str) -> str:
    """The latest phase of which the first line is there."""
    return next((phase for words, phase in reversed(_BEGINS_WITH) if words in log), CONFIG)
