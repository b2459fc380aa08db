"""What vLLM's own loader makes of a checkpoint: the oracle of every comparison of engine bytes."""

from __future__ import annotations

from pathlib import Path


def vllm_loads(folder: Path, dtype: str) -> dict[str, str]:
    """sha256 of every parameter of an engine in this process that loads the checkpoint by itself."""
    from vllm import LLM

    engine = LLM(
        model=str(folder), load_format="safetensors", skip_tokenizer_init=True, enforce_eager=True, dtype=dtype,
        max_model_len=256, kv_cache_memory_bytes=16 << 20, disable_log_stats=True,
        worker_extension_cls="rollout.weight_receiver.WeightReceiver",
    )  # fmt: skip
    ((error, text, hashes),) = engine.collective_rpc("slipstream_read_params")
    assert not error, text
    return hashes
