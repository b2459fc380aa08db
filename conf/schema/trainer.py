"""Section `trainer`: ranks, adapters and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from slipstream.conf.schema.model import DType
from slipstream.conf.schema.numerics import Match, NumericsConfig
from slipstream.conf.schema.rules import REMOVE_ONE, If, above, at_least, divisors, meant, read_if, require


class TrainMode(StrEnum):
    """Which parameters the optimizer changes."""

    lora = "lora"
    full = "full"


class Activations(StrEnum):
    """What becomes of activations between forward and backward pass."""

    recompute = "recompute"
    keep = "keep"
    host = "host"


class OptimState(StrEnum):
    """Format and place of AdamW's two moments (see OptimConfig.state)."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
    host = "host"


ENGINE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.25 to 0.33 takes as max_lora_rank (`MaxLoRARanks`)."""
MAX_EXPERT_RANK = 512
"""The highest rank of experts' adapters for which trainer/kernels has tilings that fit a GPU."""


LORA_TARGETS = ("attention", "mlp", "experts")
ATTENTION_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)
"""Last names of the matrices of any attention: of grouped queries, latent, linear."""
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
ADAPTS_ATTENTION = If(f"trainer.lora.targets={'|'.join(('attention', *ATTENTION_MODULES))}", cure=REMOVE_ONE)
HAS_EXPERTS = If("has_experts=true", ", which has no experts")
ONE_INPUT = "with which each layer keeps its input alone"
NOT_BITWISE = If("is_bitwise=false", f"trainer.numerics.match=bitwise, {ONE_INPUT}", "choose parity=standard")
NOT_MERGED = If("trainer.numerics.match!=merged", f", {ONE_INPUT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: W + (alpha / rank) * B @ A on every projection, routed experts included."""

    rank: int = 16
    """Rank of A and B. Gate and up of an expert share one A of this rank, as in PEFT's fused expert parameters."""
    attention_rank: int | None = field(default=None, metadata=read_if(ADAPTS_ATTENTION))
    """Rank in the attention; null: `rank`. The scale is alpha / `rank` everywhere."""
    expert_rank: int | None = field(
        default=None, metadata=read_if(If("trainer.lora.targets=experts", cure=REMOVE_ONE), HAS_EXPERTS)
    )
    """Rank in routed experts, whose adapters are by far the most and grow with it. At most 512. null: `rank`."""
    alpha: float = 32.0
    """Numerator of the scale alpha / rank. A power-of-two scale is exact in bfloat16."""
    dtype: DType = DType.float32
    """Format of the adapters' parameters and gradients. bfloat16 halves both; updates are rounded stochastically."""
    targets: tuple[str, ...] = LORA_TARGETS
    """What is adapted. attention: every projection of it: q, k, v and o, or q_a, q_b, kv_a, kv_b and o of latent
    attention. mlp: gate, up and down of dense feed-forwards and of shared experts. experts: those of every routed
    expert. Or single matrices of attention and mlp by their last names, as in PEFT's target_modules:
    [q_proj,v_proj]. Engines with adapters in slots need q, k and v together, and gate and up."""
    init_from: str | None = None
    """Folder of an adapter in PEFT format from which training starts, such as runs/NAME/adapter of a fine-tuning run.
    It must have these ranks and this scale; a matrix that it has no factors for starts with B = 0. It is the policy
    before training, and so algorithm.kl_coef's reference. null: A random, B zero."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # OmegaConf builds the object with a list
        require(
            self.rank >= 1,
            f"trainer.lora.rank must be >= 1, got {self.rank}; choose trainer.mode=full to train without LoRA",
        )
        at_least(1, "trainer.lora", self, "attention_rank", "expert_rank")
        above(0, "trainer.lora", self, "alpha")
        known = (*LORA_TARGETS, *ATTENTION_MODULES, *MLP_MODULES)
        for name in self.targets:
            hint = meant(name, known)
            require(name in known or not hint, f"trainer.lora.targets has no {name!r}. {hint}")
        require(
            bool(self.targets) and set(self.targets) <= set(known),
            f"trainer.lora.targets must be some of {', '.join(known)}, got {list(self.targets)}; "
            "trainer.mode=full trains without adapters",
        )

    @property
    def attention(self) -> bool:
        return not {"attention", *ATTENTION_MODULES}.isdisjoint(self.targets)

    @property
    def mlp(self) -> bool:
        return not {"mlp", *MLP_MODULES}.isdisjoint(self.targets)

    def adapts_attention(self, module: str) -> bool:
        """Whether the matrix of this last name is adapted."""
        return "attention" in self.targets or module in self.targets

    def adapts_mlp(self, module: str) -> bool:
        return "mlp" in self.targets or module in self.targets

    @property
    def experts(self) -> bool:
        return "experts" in self.targets

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def for_attention(self) -> LoraConfig | None:
        """Rank of the adapters of attention projections, with the alpha that keeps the scale; None if not adapted."""
        return self._of_rank(self.attention_rank) if self.attention else None

    @property
    def for_mlp(self) -> LoraConfig | None:
        return self._of_rank(None) if self.mlp else None

    @property
    def for_experts(self) -> LoraConfig | None:
        return self._of_rank(self.expert_rank) if self.experts else None

    def _of_rank(self, rank: int | None) -> LoraConfig:
        rank = self.rank if rank is None else rank
        return replace(self, rank=rank, alpha=self.alpha * rank / self.rank, attention_rank=None, expert_rank=None)

    @property
    def slot_rank(self) -> int:
        """Rank of an engine's adapter slots: the smallest that vLLM has kernels for and that no adapter's rank exceeds.
        0: vLLM has none that large."""
        largest = max(kind.rank for kind in (self.for_attention, self.for_mlp, self.for_experts) if kind is not None)
        return next((rank for rank in ENGINE_LORA_RANKS if rank >= largest), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019) with a linear warm-up and a constant or cosine rate after it."""

    lr: float = 1e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moments."""
    eps: ClassVar[float] = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup_steps: float = 0.0
    """Updates of linear warm-up from 0; below 1, their share of all updates of the run (0.1: the first tenth), which a
    resume with another run.num_steps keeps as long as it was. A step has algorithm.minibatches_per_step *
    algorithm.epochs_per_step updates."""
    final_lr_fraction: float = 1.0
    """Learning rate at the last step as a fraction of `lr`, reached along a cosine. 1.0: the rate is constant."""
    state: OptimState = OptimState.float32
    """Where and in which format AdamW's two moments are kept. float32: 8 bytes per parameter. bfloat16: 4 bytes; the
    second moment loses relative changes below 1/256, which are most of them with a beta of 0.999. int8: 2 bytes,
    quantized in blocks of 256. host: float32 in pinned host memory, none on the GPU; each step moves 16 bytes per
    parameter over the bus."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm (over all ranks; experts count once) to this value. 0 turns clipping off."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # OmegaConf builds the object with a list
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"trainer.optim.betas must be two numbers in [0, 1), got {list(self.betas)}",
        )
        above(0, "trainer.optim", self, "lr")
        at_least(0, "trainer.optim", self, "weight_decay", "warmup_steps", "max_grad_norm")
        require(
            self.warmup_steps < 1 or float(self.warmup_steps).is_integer(),
            f"trainer.optim.warmup_steps must be a number of updates, or a share of them below 1, got "
            f"{self.warmup_steps:g}",
        )
        require(
            0 <= self.final_lr_fraction <= 1,
            f"trainer.optim.final_lr_fraction must lie in [0, 1], got {self.final_lr_fraction}",
        )

    def warmup_updates(self, num_updates: int) -> int:
        is_share = 0 < self.warmup_steps < 1
        return max(1, round(self.warmup_steps * num_updates)) if is_share else int(self.warmup_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The trainer's ranks: how many, how the model is laid over them, and how it is optimized."""

    num_ranks: int = 1
    """Processes, one device each. Dense parameters are sharded over all of them, and gathered once a step where they
    take at most an eighth of a device's memory, else layer by layer."""
    ep_size: int = 1
    """Expert-parallel group size. It must divide num_ranks, and be at most the number of experts. Each ep_rank holds
    num_experts / ep_size experts, FSDP2-sharded over num_ranks / ep_size ranks. If ep_size does not divide the number
    of experts, shares differ by one expert, and the larger ones move from layer to layer."""
    cp_size: int = 1
    """Context-parallel group size: so many neighbouring ranks share the tokens of every sequence, for sequences that do
    not fit one rank (docs/long_contexts.md). It must divide num_ranks. It changes no value by more than the choice of a
    kernel does. Not for models with linear attention, sinks or an indexer."""
    mode: TrainMode = TrainMode.lora
    """lora: train adapters on a frozen base. full: train every weight (kept in float32)."""
    lora: LoraConfig = field(default_factory=LoraConfig, metadata=read_if(If("trainer.mode=lora")))
    """The adapters."""
    train_router: bool = field(default=False, metadata=read_if(HAS_EXPERTS))
    """Let the optimizer change MoE router weights (mode=full). Frozen ones keep RL stable and routing replayable."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    max_microbatch_tokens: int = 16384
    """The most tokens that one rank packs into one forward and backward pass; cp_size ranks together pack cp_size times
    as many. A longer sample gets a microbatch of its own."""
    activations: Activations = field(default=Activations.recompute, metadata=read_if(NOT_BITWISE))
    """It changes no value. recompute: each layer is computed again in the backward pass. keep: faster where memory is
    left; use smaller microbatches then (docs/measurements.md, whole jobs). An expert layer then keeps 2 x expert width
    numbers for each of a token's experts, beside what a dense one keeps. host: as recompute, and what a layer keeps
    for its backward pass (its input, attention's output and what attention adds) waits in page-locked host memory,
    while other layers compute: (4 x hidden + 2 x heads x head width) bytes per token and layer in bfloat16. A step's
    first microbatch leaves its last layers on the GPU, as many as fit the memory that gradients will take. On a GPU it
    makes room for longer samples or larger microbatches. Not with numerics.match=merged."""
    gate_up_kept: float = field(
        default=0.0,
        metadata=read_if(
            NOT_BITWISE, If("trainer.activations!=keep", ", with which every layer keeps it"), NOT_MERGED, HAS_EXPERTS
        ),
    )
    """Share of the expert layers that keep the product of gate and up for their backward pass although
    the rest are recomputed: 0 to 1, spread evenly over the layers. It changes no value. A
    layer then keeps 2 x expert width numbers more for each of a token's experts; with activations=host in host
    memory, where it pays until copies take longer than the forward pass (docs/measurements.md, trainer)."""
    embedding_on_host: bool = False
    """Keep the frozen table of input embeddings in page-locked host memory; a microbatch reads the rows that it needs
    over the bus. Saves vocabulary x hidden x 2 bytes on the GPU. Needs mode=lora, one rank, and a model whose head is
    not its embedding table."""
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    """Whose numbers the forward pass computes."""
    cuda_graph_tokens: int = 8192
    """Replay the layers of a microbatch of at most so many tokens as CUDA graphs: with few tokens, or a small model,
    the host takes longer to launch kernels than the GPU to run them. The second microbatch of a size is captured;
    sizes are an eighth of a power of two apart, and microbatches are padded to them, except long sequences for cuDNN,
    which are replayed at the same lengths alone. It changes no value by more than the choice of a kernel does. The
    graphs keep the memory of one such microbatch. Where that would not fit beside the fullest microbatch so far, a
    warning says so, and nothing is captured; an engine on the same GPU (cluster.share_gpu) is not counted. The log says
    where it cannot be done: with several ranks that gather weights layer by layer or share sequences (cp_size), packed
    experts, sinks, linear attention, Gemma, or values from merged weights or the engine's kernels. 0: never."""

    max_restarts: int = 3
    """How often in a run all ranks are started again, in their places, because one of them died. Each rank's state
    after a step stays in the memory of another process, on its node and on the next one: at most one finished step is
    computed again (more, where copies would take a twentieth of the time), and engines sample on. That takes three
    copies of parameters and moments in host memory, five with several nodes. Without room for them, which a line at the
    start says, or with 0, a death ends the run; slipstream resume goes on from the newest checkpoint."""

    def __post_init__(self) -> None:
        at_least(0, "trainer", self, "cuda_graph_tokens", "max_restarts")
        at_least(1, "trainer", self, "num_ranks", "ep_size", "cp_size", "max_microbatch_tokens")
        sizes = ", ".join(str(size) for size in divisors(self.num_ranks))
        for name, size in (("ep_size", self.ep_size), ("cp_size", self.cp_size)):
            require(
                self.num_ranks % size == 0,
                f"trainer.{name} must divide trainer.num_ranks, got {name}={size} and "
                f"num_ranks={self.num_ranks}; it can be {sizes}",
            )
        require(
            not (self.optim.state is OptimState.host and self.lora.dtype is DType.bfloat16),
            "trainer.optim.state=host needs trainer.lora.dtype=float32, got bfloat16; choose trainer.optim.state=int8 "
            "to save memory with bfloat16 adapters",
        )
        require(
            self.numerics.match not in (Match.merged, Match.bitwise) or self.num_ranks == 1,
            f"trainer.numerics.match={self.numerics.match} needs trainer.num_ranks=1, got {self.num_ranks}: several "
            "ranks gather adapters rounded to model.dtype, and a publish merges them as they are",
        )
        require(
            self.numerics.match is not Match.merged or self.mode is TrainMode.lora,
            "trainer.numerics.match=merged needs trainer.mode=lora: full training has no adapters",
        )
        require(
            self.activations is not Activations.host or self.numerics.match is not Match.merged,
            f"trainer.activations=host contradicts trainer.numerics.match=merged, {ONE_INPUT}; set "
            "trainer.activations=recompute",
        )
        require(
            0.0 <= self.gate_up_kept <= 1.0,
            f"trainer.gate_up_kept is a share of the expert layers, from 0 to 1, got {self.gate_up_kept:g}",
        )
        require(
            not self.embedding_on_host or (self.mode is TrainMode.lora and self.num_ranks == 1),
            "trainer.embedding_on_host=true needs trainer.mode=lora and trainer.num_ranks=1, got "
            f"mode={self.mode} and num_ranks={self.num_ranks}; several ranks share the table among them",
        )
        require(
            not (self.train_router and self.mode is TrainMode.lora),
            "trainer.train_router=true needs trainer.mode=full: adapters do not cover the router",
        )

    @property
    def activation_checkpointing(self) -> bool:
        """Whether each layer is computed again in the backward pass."""
        return self.activations is not Activations.keep

    @property
    def activations_on_host(self) -> bool:
        """Whether what such a layer keeps waits in host memory."""
        return self.activations is Activations.host

    def logprob_chunk_tokens(self, vocab_size: int) -> int:
        """Tokens whose logits exist at once in the head. 1,024 take 0.6 GB with a vocabulary of 152,000; with a small
        one more fit into little."""
        return max(1024, (1 << 20) // vocab_size)
