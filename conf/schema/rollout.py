"""Section `rollout`: the engines, and how they sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from conf.schema.rules import above, at_least, at_least_or_null, require


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How rollouts are sampled."""

    temperature: float = 1.0
    """Softmax temperature, above 0; the trainer's log-probabilities use the same one."""
    top_p: float = 1.0
    """Nucleus bound. Below 1, the engine's log-probabilities are those of the truncated distribution, so keep it at 1
    for training."""
    max_tokens: int = 256
    """Longest response, in tokens."""
    stop_at_eos: bool = True
    """End a response at the end-of-sequence token. false: sample exactly max_tokens."""

    def __post_init__(self) -> None:
        at_least(0, "rollout.sampling", temperature=self.temperature)
        require(0 < self.top_p <= 1, f"rollout.sampling.top_p must lie in (0, 1], got {self.top_p}")
        at_least(1, "rollout.sampling", max_tokens=self.max_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether responses are sampled from the model's own distribution."""
        return self.temperature == 1 and self.top_p == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The rollout workers: one vLLM engine each."""

    num_workers: int = 1
    """Engines (replicas)."""
    tp_size: int = 1
    """Tensor-parallel size of one engine; an engine uses tp_size devices. It must divide attention heads, feed-forwards
    and the vocabulary padded to a multiple of 64, and divide the key/value heads or be a multiple of them. With
    block-FP8, a rank's part must be whole blocks.
    """
    enable_expert_parallel: bool = False
    """Give each tensor-parallel rank whole experts instead of rows of every expert. GPU only."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_temperature: float | None = None
    """Softmax temperature of evaluations, with top_p 1. 0: the likeliest token. null: as rollout.sampling."""
    max_model_len: int = 4096
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int | None = None
    """The most requests that one engine decodes at once. null: as many as a run can have in flight, which is its share
    of max_concurrent_groups or of (algorithm.max_staleness_steps + 1) * algorithm.groups_per_step groups, but 1024 at
    most. vLLM decodes fewer while its KV cache holds no more.
    """
    max_num_batched_tokens: int = 8192
    """The most tokens of one engine step, at least max_num_seqs. It limits what is prefilled at once, also for the
    requests that a publish of merged weights froze. A publish waits for the steps in flight.
    """
    gpu_memory_utilization: float = 0.85
    """Share of a GPU that the engine may take. Ignored on a CPU."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache of one engine rank. null: sized by gpu_memory_utilization (GPU) or 256 MiB (CPU)."""
    enforce_eager: bool = False
    """Skip CUDA graphs and torch.compile. Always on for CPU engines."""
    batch_invariant: bool = False
    """Use kernels whose results for a token do not depend on the batch that it is in (VLLM_BATCH_INVARIANT=1), without
    torch.compile. Half of parity=bitwise, which says what it costs. GPU only.
    """
    max_concurrent_groups: int = 64
    """The most groups in flight over all workers; the buffer's back-pressure may permit fewer."""
    request_timeout_s: float = 600.0
    """If a group takes longer, it is given up, counted and sampled again on another worker, and its worker is taken out
    of service."""
    max_restarts: int = 3
    """How often a worker that failed is started again in a run; 0: it stays out of service. Ignored when
    weight_sync.enabled=false.
    """
    restart_backoff_s: float = 1.0
    """Pause after an attempt to restart a worker that failed; it doubles with every further failure. The first attempt
    comes at once. Ignored when weight_sync.enabled=false.
    """

    def __post_init__(self) -> None:
        at_least(
            1,
            "rollout",
            num_workers=self.num_workers,
            tp_size=self.tp_size,
            max_model_len=self.max_model_len,
            max_concurrent_groups=self.max_concurrent_groups,
        )
        at_least_or_null(1, "rollout", max_num_seqs=self.max_num_seqs)
        require(
            self.max_num_seqs is None or self.max_num_batched_tokens >= self.max_num_seqs,
            "rollout.max_num_batched_tokens must be >= rollout.max_num_seqs: a step decodes a token of every request; "
            f"got {self.max_num_batched_tokens} and {self.max_num_seqs}",
        )
        above(0, "rollout.sampling", temperature=self.sampling.temperature)
        at_least_or_null(0, "rollout", eval_temperature=self.eval_temperature)
        require(
            0 < self.gpu_memory_utilization < 1,
            f"rollout.gpu_memory_utilization must lie in (0, 1), got {self.gpu_memory_utilization}",
        )
        require(
            self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
            f"rollout.kv_cache_bytes must be > 0 or null, got {self.kv_cache_bytes}",
        )
        at_least(0, "rollout", max_restarts=self.max_restarts, restart_backoff_s=self.restart_backoff_s)
        above(0, "rollout", request_timeout_s=self.request_timeout_s)
        require(
            self.sampling.max_tokens < self.max_model_len,
            "rollout.sampling.max_tokens must be < rollout.max_model_len to leave room for a prompt, got "
            f"{self.sampling.max_tokens} and {self.max_model_len}",
        )
