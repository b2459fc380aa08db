"""Section `run`, and RunConfig: all sections together."""

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar

from slipstream.conf.schema.algorithm import AlgorithmConfig, Objective
from slipstream.conf.schema.cluster import ClusterConfig
from slipstream.conf.schema.data import DataConfig
from slipstream.conf.schema.model import Init, ModelConfig
from slipstream.conf.schema.numerics import Match
from slipstream.conf.schema.parity import ParityConfig
from slipstream.conf.schema.reward import RewardConfig
from slipstream.conf.schema.rollout import EVALUATED, RolloutConfig
from slipstream.conf.schema.rules import If, at_least, read_if, require, without_password
from slipstream.conf.schema.trainer import TrainerConfig, TrainMode
from slipstream.conf.schema.weight_sync import SyncMode, WeightSyncConfig

SEQS_OF_A_GRAPH = 16
"""vLLM captures CUDA graphs for multiples of this many requests, above 256."""
LOGGERS = ("tensorboard", "wandb", "mlflow")
"""What run.loggers may name; each is a package of the same name."""
MOST_SEQS = 1024
"""The most requests that an engine decodes at once if nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run itself."""

    name: str = "run"
    """Prefix of the run folder's name."""
    dir: str = "runs"
    """Folder of the run folders. A run writes to <dir>/<name>-<date>-<time>."""
    resume: str | None = None
    """Run folder whose newest checkpoint this run continues, or its URL below `checkpoint_dir`."""
    checkpoint_dir: str | None = None
    """URL of a folder in an object store, such as s3://bucket/runs: each complete checkpoint is sent to
    <checkpoint_dir>/<run> beside the steps that follow, and a resume on any machine goes on from there. Any file system
    of fsspec will do whose package is installed. Credentials are never an option: drivers read the environment. null:
    checkpoints stay in the run folder alone."""
    seed: int = 0
    """Seed of weights, prompt order and sampling."""
    num_steps: int = 100
    """Optimizer steps. --dry-run says how many epochs of the data they are."""
    checkpoint_every_steps: int = 50
    """Save the run's state after every this many steps, and at the end. 0: only at the end."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep; older ones are removed."""
    keep_best: str | None = field(default=None, metadata=read_if(EVALUATED))
    """A figure of evaluations, such as eval/reward or eval/aime/pass_at_4: the checkpoint of the step with the best one
    stays, too, as checkpoints/best. Every evaluated step is then saved. null: none is kept for that."""
    eval_every_steps: int = 20
    """Evaluate on data.eval_path or data.eval_sets before the first step, after every this many steps, and at the end.
    0: only before the first step and at the end."""
    eval_samples_per_prompt: int = field(default=1, metadata=read_if(EVALUATED))
    """Responses per held-out prompt: pass@k is told for this k, and for 1, 2, 4 and so on below it."""
    eval_right_from: float = field(default=1.0, metadata=read_if(EVALUATED))
    """A response with this reward or a larger one counts as right, for pass@k and majority votes, whatever its length
    took from it (reward.overlong_tokens, reward.length_penalty)."""
    eval_beside: bool = field(default=False, metadata=read_if(EVALUATED))
    """Evaluate while training goes on, instead of waiting for the evaluation. Its figures are in the row of the step
    during which it ends; eval/step says whose they are. With weight_sync.mode=adapter engines keep its version in a
    slot of its own. Merged weights change under it: eval/version_spread tells how far."""
    eval_share: ClassVar[float] = 0.25
    """With `eval_beside`: how many responses an evaluation has in flight at most, as a share of the requests that the
    engines decode for training; engines get as much more room."""
    samples_per_step: int = 16
    """Responses of every step, and of every evaluation, that samples.jsonl shows token by token. 0: none."""
    max_sample_bytes_per_step: ClassVar[int] = 262_144
    """The most bytes that one step adds to samples.jsonl, where a sampled token takes about 30. Responses that are too
    long for it lose their middle."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """Where the rows of metrics.jsonl go, too: tensorboard (events in the run folder), wandb, mlflow. []: nowhere.
    Their keys, W&B's mode (WANDB_MODE) and MLflow's address (MLFLOW_TRACKING_URI) are the environment's."""
    project: str = field(
        default="slipstream", metadata=read_if(If("run.loggers=wandb|mlflow", cure="name wandb or mlflow there"))
    )
    """Project of W&B (PROJECT, or TEAM/PROJECT of a team or another user) and experiment of MLflow of the runs."""

    def __post_init__(self) -> None:
        require(
            "/" not in self.name and 0 < len(self.name.encode(errors="surrogateescape")) <= 200,  # the date comes too
            f"run.name must be a file name of at most 200 bytes, got {self.name!r}; the folder is run.dir",
        )
        url = self.checkpoint_dir
        require(
            url is None or bool(re.fullmatch(r"\w[\w+.-]*://[^?]+", url)),
            f"run.checkpoint_dir must be a URL such as s3://bucket/runs or file:///mnt/disk/runs, got {url!r}",
        )
        without_password("run.checkpoint_dir", url)
        if self.resume is not None and "://" in self.resume:
            above = self.resume.rstrip("/").rpartition("/")[0]
            require(
                url is not None and url.rstrip("/") == above,
                f"run.resume={self.resume} is a URL: give run.checkpoint_dir={above}, too, where checkpoints go on",
            )
        require(bool(self.dir), "run.dir must be a folder, got nothing; the working directory is run.dir=.")
        at_least(0, "run", self, "eval_every_steps", "seed", "num_steps", "checkpoint_every_steps", "samples_per_step")
        for name in self.loggers:
            require(name in LOGGERS, f"run.loggers must be a list of {', '.join(LOGGERS)}, got {name!r}")
        require(len(set(self.loggers)) == len(self.loggers), f"run.loggers names one twice: {list(self.loggers)}")
        parts = self.project.split("/")
        require(
            bool(self.project) and ("wandb" not in self.loggers or (all(parts) and len(parts) <= 2)),
            f"run.project must be a name; for W&B PROJECT or TEAM/PROJECT; got {self.project!r}",
        )
        require(self.seed < 1 << 63, f"run.seed must be < 2**63, got {self.seed}")
        at_least(1, "run", self, "keep_checkpoints", "eval_samples_per_prompt")
        require(math.isfinite(self.eval_right_from), f"run.eval_right_from must be finite, got {self.eval_right_from}")

    @property
    def pass_ks(self) -> tuple[int, ...]:
        num_samples = self.eval_samples_per_prompt
        return (*(1 << power for power in range((num_samples - 1).bit_length())), num_samples)

    def is_due(self, every_steps: int, step: int) -> bool:
        """Whether `step` is the last one or a multiple of every_steps. With every_steps=0: only the last one."""
        return step == self.num_steps or (every_steps > 0 and step % every_steps == 0)


def _share(num: int) -> float:
    """One of so many equal shares of a GPU. Ray counts ten-thousandths."""
    return 10_000 // num / 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All options of one run. Built by `conf.load.load_run_config`; classes take their own section of it."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(init=Init.random, hf_config={"model_type": "qwen3_moe"})
    )
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def gpus_of_rank(self) -> float:
        """GPUs of a trainer rank; with cluster.share_gpu an equal share of the one GPU."""
        return self._share_of_gpu if self.cluster.share_gpu else 1.0

    @property
    def gpus_of_worker(self) -> float:
        """GPUs of a rollout worker; an equal share of one with rollout.workers_per_gpu."""
        if self.cluster.share_gpu:
            return self._share_of_gpu
        per_gpu = self.rollout.workers_per_gpu
        return float(self.rollout.tp_size) if per_gpu == 1 else _share(per_gpu)

    @property
    def _share_of_gpu(self) -> float:
        return _share(1 + self.rollout.most_workers)

    @property
    def is_bitwise(self) -> bool:
        """Whether trainer and engines compute the same bits: the trainer calls their batch-invariant kernels."""
        return self.trainer.numerics.match is Match.bitwise

    @property
    def reads_initial_adapter(self) -> bool:
        """Whether trainer.lora.init_from is read. A checkpoint has what training made of it, so that a resumed run
        needs it for a reference alone."""
        is_given = self.trainer.mode is TrainMode.lora and self.trainer.lora.init_from is not None
        is_needed = self.run.resume is None or self.algorithm.needs_reference
        return is_given and is_needed

    @property
    def engine_num_seqs(self) -> int:
        """rollout.max_num_seqs, or an engine's share of the requests that the loop lets be in flight, rounded up to a
        size that has a CUDA graph of its own. An evaluation beside training comes on top."""
        rollout, algorithm = self.rollout, self.algorithm
        if rollout.max_num_seqs is not None:
            return rollout.max_num_seqs
        num_groups = (algorithm.max_staleness_steps + 1) * algorithm.groups_per_step
        num_groups = -(-min(num_groups, rollout.max_concurrent_groups) // rollout.least_workers)
        wanted = num_groups * algorithm.group_size
        if self.evaluates_beside:
            wanted += math.ceil(wanted * self.run.eval_share)
        num_seqs = -(-wanted // SEQS_OF_A_GRAPH) * SEQS_OF_A_GRAPH
        return min(num_seqs, MOST_SEQS, rollout.max_num_batched_tokens)

    @property
    def rounding_seed(self) -> int | None:
        return self.weight_sync.rounding_seed(self.run.seed)

    @property
    def loses_updates(self) -> bool:
        """Whether engines get weights that an adapter was merged into and that were rounded to nearest."""
        has_merged = self.trainer.mode is TrainMode.lora and self.weight_sync.mode is SyncMode.merged
        return has_merged and self.rounding_seed is None

    @property
    def evaluates_beside(self) -> bool:
        return (
            self.run.eval_beside and bool(self.data.held_out_sources) and self.algorithm.objective is Objective.policy
        )

    @property
    def num_evaluated_groups(self) -> int:
        """Held-out prompts that are sampled at the same time: as many as training's groups, or eval_share of the
        requests that engines decode for training."""
        rollout, run = self.rollout, self.run
        if not self.evaluates_beside:
            return rollout.max_concurrent_groups
        num_seqs = self.engine_num_seqs * rollout.least_workers * run.eval_share / (1 + run.eval_share)
        return max(1, int(num_seqs) // run.eval_samples_per_prompt)

    @property
    def num_adapter_slots(self) -> int:
        """Versions of an adapter that an engine holds: one serves, one is written, requests may be
        algorithm.max_staleness_steps older, and an evaluation beside training keeps its own."""
        return self.algorithm.max_staleness_steps + 2 + self.evaluates_beside

    @property
    def num_versions_kept(self) -> int:
        """For how many further versions a rollout worker keeps what it sampled, in case the controller is killed. 0: it
        ends with the controller."""
        outlives = self.cluster.ray_address is None and self.run.num_steps > 0
        return self.algorithm.max_staleness_steps + 1 if outlives else 0

    @property
    def max_response_tokens(self) -> int:
        """The most sampled tokens of a rollout: rollout.sampling.max_tokens, or an episode's."""
        rollout = self.rollout
        if rollout.agent is None:
            return rollout.sampling.max_tokens
        most = rollout.episodes.max_turns * rollout.sampling.max_tokens
        return most if rollout.episodes.max_tokens is None else rollout.episodes.max_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """data.max_prompt_tokens, or rollout.max_model_len - rollout.sampling.max_tokens."""
        left = self.rollout.max_model_len - self.rollout.sampling.max_tokens
        return left if self.data.max_prompt_tokens is None else self.data.max_prompt_tokens
