"""Every option of a run, once: its type, its meaning, its unit and its default.

Each section is a frozen dataclass. YAML files under `conf/<group>/` choose values and never types; `conf/load.py`
composes them and is the only place that sees a DictConfig. A rule about one section is checked in that section's
`__post_init__`; a rule across sections is a `check_<rule>` in `conf/checks.py`. Derived values are properties that
carry their formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from conf.errors import ConfigError


class Init(StrEnum):
    """Where the policy's first weights come from."""

    checkpoint = "checkpoint"
    random = "random"


class DType(StrEnum):
    """Floating-point format of stored weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class MlaNormEps(StrEnum):
    """Which eps the norms of latent attention's low-rank projections take."""

    rollout = "rollout"
    hf = "hf"


class TrainMode(StrEnum):
    """Which parameters the optimizer changes."""

    lora = "lora"
    full = "full"


class CombineMode(StrEnum):
    """Where the weighted sum of a token's expert outputs is rounded, and in what order it runs."""

    fp32_once = "fp32_once"
    vllm_like = "vllm_like"
    hf_eager = "hf_eager"


class OptimState(StrEnum):
    """Format and place of AdamW's two moments (see OptimConfig.state)."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
    host = "host"


class Objective(StrEnum):
    """What the trainer minimizes: the policy-gradient loss of sampled and judged rollouts, or the negative
    log-likelihood of given conversations.
    """

    policy = "policy"
    sft = "sft"


class Normalization(StrEnum):
    """What one token's loss is divided by: the tokens of the whole batch, or first its own sequence's, then the
    sequences'.
    """

    token = "token"
    sequence = "sequence"


class RatioBaseline(StrEnum):
    """The policy in the denominator of the importance ratio (see AlgorithmConfig.ratio_baseline)."""

    rollout = "rollout"
    trainer = "trainer"


class AdvantageScale(StrEnum):
    """How group advantages are scaled: by the group's standard deviation (GRPO) or not at all (Dr. GRPO)."""

    std = "std"
    none = "none"


class PauseMode(StrEnum):
    """What happens to requests in flight while weights change: frozen and continued, drained first, or aborted."""

    keep = "keep"
    wait = "wait"
    abort = "abort"


class SyncMode(StrEnum):
    """What a publish carries: whole weights with the adapter merged in, or the adapter alone, into a slot."""

    merged = "merged"
    adapter = "adapter"


class BusySlot(StrEnum):
    """What a publish does when requests of older versions read every adapter slot: wait for them, sample them anew
    under the newest version, or go on with what they have so far under the newest version.
    """

    wait = "wait"
    requeue = "requeue"
    re_prefill = "re_prefill"


class TransportKind(StrEnum):
    """Link that carries the weights. `auto` takes nvlink when both ends are GPUs of this host, rdma when a NIC is
    found, else tcp.
    """

    auto = "auto"
    tcp = "tcp"
    nvlink = "nvlink"
    rdma = "rdma"


class Device(StrEnum):
    """Kind of device that trainer ranks and rollout workers run on. `auto` takes GPUs when this machine has any."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class EngineFormat(StrEnum):
    """Format of an engine's weights."""

    checkpoint = "checkpoint"
    block_fp8 = "block_fp8"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy: which architecture, from which files, in which format."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer). Required when init=checkpoint."""
    init: Init = Init.checkpoint
    """checkpoint: read weights from `path`. random: draw them from `run.seed`, for any layout alike."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config fields (model_type, hidden_size, ...). With init=random: the whole config when path is null,
    else overrides of path's config.json.
    """
    init_std: float = 0.02
    """Standard deviation of random weights. Ignored when init=checkpoint."""
    dtype: DType = DType.bfloat16
    """Format of the frozen weights, of the engine's weights and of activations."""
    mla_norm_eps: MlaNormEps = MlaNormEps.rollout
    """eps of q_a_layernorm and kv_a_layernorm (DeepSeek-V3, Kimi-K2). rollout: rms_norm_eps of the config, as vLLM.
    hf: 1e-6, as transformers. Read by no other architecture.
    """
    engine_format: EngineFormat = EngineFormat.checkpoint
    """checkpoint: engines' weights are as config.json says: block-FP8 where its quantization_config asks for it, else
    `dtype`. block_fp8: block-FP8 (128 x 128, DeepSeek-V3's) although config.json has none. The trainer's base has
    `dtype` in any case, and a publish quantizes what it merged.
    """
    tokenizer: str | None = None
    """Folder of a tokenizer, or `characters`: one token per printable character, made on the spot. null: the one in
    `path`.
    """

    def __post_init__(self) -> None:
        _require(self.init_std > 0, f"model.init_std must be > 0, got {self.init_std}")
        if self.init is Init.checkpoint:
            _require(
                self.path is not None,
                "model.path is required when model.init=checkpoint; give a checkpoint folder, or choose a model that "
                "brings its own: model=tiny_qwen3_moe (a whole run to try: experiment=quickstart)",
            )
            _require(
                not self.hf_config,
                "model.hf_config is only read when model.init=random; choose model=checkpoint, which has none, or set "
                "model.init=random",
            )
        else:
            _require(
                bool(self.path or self.hf_config),
                "model.init=random needs model.hf_config (or model.path with a config.json)",
            )


ENGINE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""max_lora_rank of vLLM 0.25 to 0.33 (`MaxLoRARanks`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: W + (alpha / rank) * B @ A on every projection, routed experts included."""

    rank: int = 16
    """Rank of A and B. Experts: one rank-`rank` A is shared by gate and up of an expert, as in PEFT's fused expert
    parameters.
    """
    attention_rank: int | None = None
    """Rank in the attention; null: `rank`. The scale is alpha / `rank` everywhere."""
    expert_rank: int | None = None
    """Rank in routed experts, whose adapters are by far the most: their memory grows with it. null: `rank`."""
    alpha: float = 32.0
    """Numerator of the scale alpha / rank. A power-of-two scale is exact in bfloat16."""
    dtype: DType = DType.float32
    """Format of the adapters' parameters and gradients. bfloat16 halves both; updates are then rounded stochastically.
    """
    attention: bool = True
    """Adapt every projection of the attention: q, k, v and o, or q_a, q_b, kv_a, kv_b and o of latent attention."""
    mlp: bool = True
    """Adapt gate, up and down of the dense feed-forwards, shared experts among them, where a layer has one."""
    experts: bool = True
    """Adapt gate, up and down of every routed expert."""

    def __post_init__(self) -> None:
        _require(
            self.rank >= 1,
            f"trainer.lora.rank must be >= 1, got {self.rank}; choose trainer.mode=full to train without LoRA",
        )
        for name, rank in (("attention_rank", self.attention_rank), ("expert_rank", self.expert_rank)):
            _require(rank is None or rank >= 1, f"trainer.lora.{name} must be >= 1 or null, got {rank}")
        _require(self.alpha > 0, f"trainer.lora.alpha must be > 0, got {self.alpha}")
        _require(
            self.attention or self.mlp or self.experts,
            "trainer.lora adapts nothing: set attention, mlp or experts to true, or trainer.mode=full",
        )

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    @property
    def for_attention(self) -> LoraConfig | None:
        """Of attention projections: their rank, and the alpha that keeps the scale; None where not adapted."""
        return self._of_rank(self.attention_rank) if self.attention else None

    @property
    def for_mlp(self) -> LoraConfig | None:
        """Of dense feed-forwards."""
        return self._of_rank(None) if self.mlp else None

    @property
    def for_experts(self) -> LoraConfig | None:
        """Of routed experts."""
        return self._of_rank(self.expert_rank) if self.experts else None

    def _of_rank(self, rank: int | None) -> LoraConfig:
        rank = self.rank if rank is None else rank
        return replace(self, rank=rank, alpha=self.alpha * rank / self.rank, attention_rank=None, expert_rank=None)

    @property
    def slot_rank(self) -> int:
        """Rank of an engine's adapter slots: the smallest that vLLM has kernels for and that holds every kind's; 0:
        none.
        """
        largest = max(kind.rank for kind in (self.for_attention, self.for_mlp, self.for_experts) if kind is not None)
        return next((rank for rank in ENGINE_LORA_RANKS if rank >= largest), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019) with a linear warm-up and a constant or cosine rate after it."""

    lr: float = 1e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moments."""
    eps: float = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    final_lr_fraction: float = 1.0
    """Rate at the last step as a fraction of `lr`, reached along a cosine; 1.0 keeps the rate constant."""
    state: OptimState = OptimState.float32
    """Where AdamW's two moments are kept. float32: 8 bytes a parameter. bfloat16: 4; the second moment loses changes
    below 1/256, which 0.999 makes most of them. int8: 2, quantized in blocks of 256. host: float32 in pinned host
    memory, none on the GPU; each step moves 16 bytes a parameter over the bus.
    """
    max_grad_norm: float = 1.0
    """Clip the global gradient norm (all ranks, experts counted once) to this value. 0 turns clipping off."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # OmegaConf builds the object with a list
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"trainer.optim.betas must be two numbers in [0, 1), got {list(self.betas)}",
        )
        _require(self.eps > 0, f"trainer.optim.eps must be > 0, got {self.eps}")
        _require(self.weight_decay >= 0, f"trainer.optim.weight_decay must be >= 0, got {self.weight_decay}")
        _require(self.lr > 0, f"trainer.optim.lr must be > 0, got {self.lr}")
        _require(self.warmup_steps >= 0, f"trainer.optim.warmup_steps must be >= 0, got {self.warmup_steps}")
        _require(
            0 <= self.final_lr_fraction <= 1,
            f"trainer.optim.final_lr_fraction must lie in [0, 1], got {self.final_lr_fraction}",
        )
        _require(self.max_grad_norm >= 0, f"trainer.optim.max_grad_norm must be >= 0, got {self.max_grad_norm}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The trainer's ranks: how many, how the model is laid over them, and how it is optimized."""

    num_ranks: int = 1
    """Processes, one device each. Dense parameters are sharded over all of them by FSDP2."""
    ep_size: int = 1
    """Expert-parallel group size; divides num_ranks, and is at most the number of experts. Each ep_rank holds
    num_experts / ep_size experts, FSDP2-sharded over num_ranks / ep_size ranks; where they do not divide, shares differ
    by one expert, and the larger ones move from layer to layer.
    """
    mode: TrainMode = TrainMode.lora
    """lora: train adapters on a frozen base. full: train every weight (kept in float32)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Ignored when mode=full."""
    train_router: bool = False
    """Let the optimizer change MoE router weights (mode=full only). Frozen routers keep RL stable and routing
    replayable.
    """
    optim: OptimConfig = field(default_factory=OptimConfig)
    max_microbatch_tokens: int = 16384
    """Upper bound on the tokens that one rank packs into one forward-backward. A longer sample gets a microbatch of
    its own.
    """
    activation_checkpointing: bool = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    combine: CombineMode = CombineMode.fp32_once
    """How a token's expert outputs are summed, to agree with an engine to the last bits. fp32_once: products and sum in
    float32 over slots, one rounding. vllm_like: products rounded to model.dtype first; for 2, 3 or 4 experts a token,
    partial sums too. hf_eager: both rounded, experts in ascending order, as transformers' eager experts.
    """
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at once in the head; bounds its memory to chunk x vocabulary x 4 bytes."""

    def __post_init__(self) -> None:
        _require(self.num_ranks >= 1, f"trainer.num_ranks must be >= 1, got {self.num_ranks}")
        _require(self.ep_size >= 1, f"trainer.ep_size must be >= 1, got {self.ep_size}")
        _require(
            self.num_ranks % self.ep_size == 0,
            f"trainer.ep_size must divide trainer.num_ranks, got ep_size={self.ep_size} and num_ranks={self.num_ranks}",
        )
        _require(
            self.max_microbatch_tokens >= 1,
            f"trainer.max_microbatch_tokens must be >= 1, got {self.max_microbatch_tokens}",
        )
        _require(
            self.logprob_chunk_tokens >= 1,
            f"trainer.logprob_chunk_tokens must be >= 1, got {self.logprob_chunk_tokens}",
        )
        _require(
            not (self.optim.state is OptimState.host and self.lora.dtype is DType.bfloat16),
            "trainer.optim.state=host needs trainer.lora.dtype=float32, got bfloat16; choose trainer.optim.state=int8 "
            "to save memory with bfloat16 adapters",
        )
        _require(
            not (self.train_router and self.mode is TrainMode.lora),
            "trainer.train_router=true needs trainer.mode=full: adapters do not cover the router",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How rollouts are sampled."""

    temperature: float = 1.0
    """Softmax temperature; the trainer's log-probabilities use the same one."""
    top_p: float = 1.0
    """Nucleus bound. Below 1 the engine's log-probabilities are of the truncated distribution: keep 1 for training."""
    max_tokens: int = 256
    """Longest response, in tokens."""
    stop_at_eos: bool = True
    """End a response at the end-of-sequence token; false samples exactly max_tokens."""

    def __post_init__(self) -> None:
        _require(self.temperature > 0, f"rollout.sampling.temperature must be > 0, got {self.temperature}")
        _require(0 < self.top_p <= 1, f"rollout.sampling.top_p must lie in (0, 1], got {self.top_p}")
        _require(self.max_tokens >= 1, f"rollout.sampling.max_tokens must be >= 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The rollout workers: one vLLM engine each."""

    num_workers: int = 1
    """Engines (replicas)."""
    tp_size: int = 1
    """Tensor-parallel size of one engine; a replica uses tp_size devices."""
    enable_expert_parallel: bool = False
    """Split experts, not their rows, over the tensor-parallel ranks. GPU only."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_model_len: int = 4096
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int = 256
    """Requests that one engine decodes at once."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU that the engine may take. Ignored on a CPU."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache of one engine rank. null: sized by gpu_memory_utilization (GPU) or 256 MiB (CPU)."""
    enforce_eager: bool = False
    """Skip CUDA graphs and torch.compile. Always on for CPU engines."""
    max_concurrent_groups: int = 64
    """Groups in flight over all workers; the buffer's back-pressure may hold fewer."""
    request_timeout_s: float = 600.0
    """A group that takes longer is given up, counted and sampled again on another worker; its own leaves service."""
    max_restarts: int = 3
    """How often one worker that failed is started again in a run; 0: it stays out of service. Ignored when
    weight_sync.enabled=false.
    """
    restart_backoff_s: float = 1.0
    """Pause before the first restart of a worker; doubles with every further one."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "tp_size", "max_model_len", "max_num_seqs", "max_concurrent_groups"):
            _require(getattr(self, name) >= 1, f"rollout.{name} must be >= 1, got {getattr(self, name)}")
        _require(
            0 < self.gpu_memory_utilization < 1,
            f"rollout.gpu_memory_utilization must lie in (0, 1), got {self.gpu_memory_utilization}",
        )
        _require(
            self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
            f"rollout.kv_cache_bytes must be > 0 or null, got {self.kv_cache_bytes}",
        )
        _require(self.max_restarts >= 0, f"rollout.max_restarts must be >= 0, got {self.max_restarts}")
        _require(self.restart_backoff_s >= 0, f"rollout.restart_backoff_s must be >= 0, got {self.restart_backoff_s}")
        _require(self.request_timeout_s > 0, f"rollout.request_timeout_s must be > 0, got {self.request_timeout_s}")
        _require(
            self.sampling.max_tokens < self.max_model_len,
            "rollout.sampling.max_tokens must be < rollout.max_model_len to leave room for a prompt, got "
            f"{self.sampling.max_tokens} and {self.max_model_len}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    """The path of new weights from trainer ranks into live engines."""

    enabled: bool = True
    """false: publish version 0 only. For experiments that show what publishing is worth."""
    mode: SyncMode = SyncMode.merged
    """merged: W + (alpha / rank) * B @ A replaces the engine's weights, while it is paused. adapter: the base is sent
    once, then only A and B, into a free slot of the running engine, which is never paused; requests finish on the
    version that they started with. Needs trainer.mode=lora, and GPU engines where the model has experts.
    """
    on_busy_slot: BusySlot = BusySlot.wait
    """When requests of older versions read every slot (there are algorithm.max_staleness_steps + 2). `wait` gives up
    after half of timeout_s. Ignored when mode=merged.
    """
    transport: TransportKind = TransportKind.auto
    """Link that must carry the weights; one that is really another link is an error, never a fallback."""
    watermark_bytes: int = 1 << 30
    """Most temporary device memory that a publish may hold on one rank at once, every kind counted. A single transfer
    is cut to at most half of it.
    """
    pause_mode: PauseMode = PauseMode.keep
    """What happens to requests in flight while weights change. With `wait` the longest response must fit timeout_s.
    Ignored when mode=adapter.
    """
    keep_kv: bool = False
    """true: requests in flight go on with KV entries of older weights. false: they are prefilled again under the new
    weights. Ignored when mode=adapter.
    """
    verify_hashes: bool = True
    """Compare a position-dependent 64-bit hash of every parameter at both ends before a version is committed."""
    timeout_s: float = 60.0
    """Deadline of one publish to one replica. A replica that misses it is out of service; the others commit."""
    publish_waves: int = 1
    """Groups in which replicas are updated, one after the other. Above 1 a trainer that dies during a publish leaves
    replicas that serve; a publish takes that many times as long.
    """
    trace_every_steps: int = 0
    """Write the timeline of every publish whose version is a multiple of this to traces/ in the run folder, for
    ui.perfetto.dev. 0: never.
    """

    def __post_init__(self) -> None:
        _require(
            self.watermark_bytes >= 1 << 16, f"weight_sync.watermark_bytes must be >= 65536, got {self.watermark_bytes}"
        )
        _require(self.timeout_s > 0, f"weight_sync.timeout_s must be > 0, got {self.timeout_s}")
        _require(self.publish_waves >= 1, f"weight_sync.publish_waves must be >= 1, got {self.publish_waves}")
        _require(
            self.trace_every_steps >= 0, f"weight_sync.trace_every_steps must be >= 0, got {self.trace_every_steps}"
        )
        _require(
            not (self.keep_kv and self.pause_mode is not PauseMode.keep),
            f"weight_sync.keep_kv=true needs weight_sync.pause_mode=keep, got pause_mode={self.pause_mode}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and its family; or supervised fine-tuning."""

    objective: Objective = Objective.policy
    """policy: reinforcement learning. sft: learn the assistant's tokens of the conversations in data.path; no engine
    is started, and of this section only `sequences_per_step` and `normalization` are read.
    """
    sequences_per_step: int = 64
    """Conversations that make one optimizer step. Ignored when objective=policy."""
    group_size: int = 16
    """Rollouts sampled for one prompt; the advantage compares them with each other."""
    groups_per_step: int = 16
    """Groups that make one batch, hence one optimizer step."""
    max_staleness_steps: int = 1
    """Oldest policy version that a sample may contain, counted back from the trainer's at consumption. 0 is strictly
    on-policy.
    """
    advantage_scale: AdvantageScale = AdvantageScale.std
    """std: (r - mean) / (std + 1e-6). none: r - mean (Dr. GRPO, arXiv:2503.20783)."""
    shuffle_advantages: bool = False
    """Permute advantages within each group: a control that must not learn."""
    normalization: Normalization = Normalization.token
    """token: every response token of the batch weighs the same (DAPO, arXiv:2503.14476). sequence: every response
    weighs the same.
    """
    clip_low: float = 0.2
    """Lower clip of the importance ratio: 1 - clip_low. Ignored when ratio_baseline=trainer, whose ratio is 1."""
    clip_high: float = 0.28
    """Upper clip of the importance ratio: 1 + clip_high (clip-higher, DAPO). Ignored when ratio_baseline=trainer."""
    ratio_baseline: RatioBaseline = RatioBaseline.trainer
    """trainer: the ratio starts at 1 each step and the engine's mismatch is corrected by `tis_max`. rollout: the ratio
    is taken against the engine's log-probabilities and clipped.
    """
    tis_max: float = 2.0
    """Truncated importance sampling: a token's weight is min(exp(trainer - rollout), tis_max). 0 turns it off; must be
    0 when ratio_baseline=rollout.
    """
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference); the reference is the policy before training. 0 skips its
    forward pass.
    """
    drop_zero_variance_groups: bool = False
    """Drop groups whose rewards are all equal and sample others in their place (dynamic sampling, DAPO)."""

    def __post_init__(self) -> None:
        _require(
            self.group_size >= 2,
            f"algorithm.group_size must be >= 2, got {self.group_size}: a group of one has no advantage",
        )
        for name in ("groups_per_step", "sequences_per_step"):
            _require(getattr(self, name) >= 1, f"algorithm.{name} must be >= 1, got {getattr(self, name)}")
        _require(
            self.max_staleness_steps >= 0, f"algorithm.max_staleness_steps must be >= 0, got {self.max_staleness_steps}"
        )
        _require(0 < self.clip_low < 1, f"algorithm.clip_low must lie in (0, 1), got {self.clip_low}")
        _require(self.clip_high > 0, f"algorithm.clip_high must be > 0, got {self.clip_high}")
        _require(self.tis_max == 0 or self.tis_max >= 1, f"algorithm.tis_max must be 0 or >= 1, got {self.tis_max}")
        _require(self.kl_coef >= 0, f"algorithm.kl_coef must be >= 0, got {self.kl_coef}")
        _require(
            not (self.ratio_baseline is RatioBaseline.rollout and self.tis_max > 0),
            "algorithm.ratio_baseline=rollout already corrects for the engine's log-probabilities: set "
            "algorithm.tis_max=0 with it",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts, from JSONL or Parquet: a `prompt` column (text, or a list of chat messages) and any further columns,
    which rewards see.
    """

    path: str | None = None
    """Training prompts: a .jsonl or .parquet file. Relative paths start at the working directory; `pkg://NAME` is a
    file that ships in conf/data.
    """
    eval_path: str | None = None
    """Held-out prompts, same format. null: no evaluation."""
    prompt_key: str = "prompt"
    """Name of the prompt column."""
    response_key: str = "response"
    """algorithm=sft: name of the column with the answer to `prompt_key`, where a row is not a list of messages."""
    messages_key: str = "messages"
    """algorithm=sft: name of the column with a conversation, a list of {role, content}. Its assistant turns are taught.
    """
    max_sequence_tokens: int | None = None
    """algorithm=sft: longer conversations are refused before the run starts, with the line number. null: any length.
    """
    max_prompt_tokens: int = 2048
    """Longer prompts are refused before the run starts, with the line number."""
    shuffle: bool = True
    """Draw prompts in an order seeded by run.seed, a new one each epoch; false keeps the file's order."""
    add_special_tokens: bool = True
    """Let the tokenizer add its special tokens to plain-text prompts. Chat prompts always go through the chat
    template.
    """

    def __post_init__(self) -> None:
        _require(self.max_prompt_tokens >= 1, f"data.max_prompt_tokens must be >= 1, got {self.max_prompt_tokens}")
        _require(
            self.max_sequence_tokens is None or self.max_sequence_tokens >= 2,
            f"data.max_sequence_tokens must be >= 2 or null, got {self.max_sequence_tokens}",
        )
        for name in ("prompt_key", "response_key", "messages_key"):
            _require(bool(getattr(self, name)), f"data.{name} must name a column, got nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """What a response is worth: the same kind of reward for every row."""

    kind: str = "exact_match"
    """exact_match, regex, or the import path `package.module:function` of a function (prompt, response, fields) ->
    float.
    """
    answer_key: str = "answer"
    """Column with the expected answer; for exact_match and regex."""
    pattern: str = r"(.+)"
    """regex: the first group of the first match in the response is compared with the answer."""
    timeout_s: float = 10.0
    """A reward that takes longer costs its sample: the sample gets no gradient and is counted."""
    num_processes: int = 1
    """Processes that run rewards, apart from the controller."""

    def __post_init__(self) -> None:
        _require(
            self.kind in ("exact_match", "regex") or ":" in self.kind,
            f"reward.kind must be exact_match, regex or an import path like package.module:function, got {self.kind!r}",
        )
        _require(self.timeout_s > 0, f"reward.timeout_s must be > 0, got {self.timeout_s}")
        _require(self.num_processes >= 1, f"reward.num_processes must be >= 1, got {self.num_processes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Machines."""

    device: Device = Device.auto
    """Kind of device for trainer ranks and rollout workers."""
    trainer_gpus: int | None = None
    """`slipstream plan` alone: carry the trainer to so many GPUs, a multiple of trainer.ep_size. null:
    trainer.num_ranks.
    """
    rollout_gpus: int | None = None
    """`slipstream plan` alone: carry the rollout workers to so many GPUs, a multiple of rollout.tp_size. null:
    rollout.num_workers x rollout.tp_size.
    """
    ray_address: str | None = None
    """Address of a running Ray cluster (its processes must land on one machine: they meet over loopback), or `auto`
    for the one that runs here. null: start one on this machine, bound to loopback, and stop it at the end.
    """
    dashboard: bool = True
    """Start the Ray dashboard with a cluster of our own."""
    dashboard_port: int = 8265
    """Port of that dashboard."""
    object_store_bytes: int = 512 << 20
    """Size of Ray's object store with a cluster of our own; batches pass through it, weights never do."""
    start_timeout_s: float = 900.0
    """Longest wait for trainer ranks and engines to come up."""

    def __post_init__(self) -> None:
        for name in ("trainer_gpus", "rollout_gpus"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"cluster.{name} must be >= 1 or null, got {value}")
        _require(
            1024 <= self.dashboard_port <= 65535,
            f"cluster.dashboard_port must lie in [1024, 65535], got {self.dashboard_port}",
        )
        _require(
            self.object_store_bytes >= 80 << 20,  # Ray refuses less than 75 MiB, after it has started
            f"cluster.object_store_bytes must be >= {80 << 20}, got {self.object_store_bytes}",
        )
        _require(self.start_timeout_s > 0, f"cluster.start_timeout_s must be > 0, got {self.start_timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run itself."""

    name: str = "run"
    """Prefix of the run folder's name."""
    dir: str = "runs"
    """Folder that holds run folders. One run: <dir>/<name>-<date>-<time>."""
    resume: str | None = None
    """A run folder to continue from its newest checkpoint."""
    seed: int = 0
    """Seed of weights, prompt order and sampling."""
    num_steps: int = 100
    """Optimizer steps."""
    checkpoint_every_steps: int = 50
    """Write the run's state this often, and at the end. 0: at the end only."""
    keep_checkpoints: int = 2
    """Older checkpoints are removed."""
    eval_every_steps: int = 20
    """Evaluate on data.eval_path before the first step, this often, and at the end. 0: only first and last."""
    eval_samples_per_prompt: int = 1
    """Responses per held-out prompt."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""

    def __post_init__(self) -> None:
        _require(
            bool(self.name) and "/" not in self.name,
            f"run.name must be a file name, got {self.name!r}; the folder is run.dir",
        )
        _require(bool(self.dir), "run.dir must be a folder, got nothing; the working directory is run.dir=.")
        _require(self.eval_every_steps >= 0, f"run.eval_every_steps must be >= 0, got {self.eval_every_steps}")
        _require(self.seed >= 0, f"run.seed must be >= 0, got {self.seed}")
        _require(self.num_steps >= 0, f"run.num_steps must be >= 0, got {self.num_steps}")
        _require(
            self.checkpoint_every_steps >= 0,
            f"run.checkpoint_every_steps must be >= 0, got {self.checkpoint_every_steps}",
        )
        _require(self.keep_checkpoints >= 1, f"run.keep_checkpoints must be >= 1, got {self.keep_checkpoints}")
        _require(
            self.eval_samples_per_prompt >= 1,
            f"run.eval_samples_per_prompt must be >= 1, got {self.eval_samples_per_prompt}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything one run needs. Built by `conf.load.load_run_config`; classes take their own section of it."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(init=Init.random, hf_config={"model_type": "qwen3_moe"})
    )
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
