"""Section `rollout`: the engines, and how they sample."""

import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar
from urllib.parse import urlsplit

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema.engine_arguments import check_engine_options
from slipstream.conf.schema.rules import REMOVE_ONE, If, above, at_least, read_if, require, without_password

ALL_ENGINES = ": rollout.num_workers is how many there are"
DRAWN = If("rollout.eval.temperature!=0", ", which takes the likeliest token", REMOVE_ONE)
SPREAD = If("cluster.ray_address!=null", ": the whole run is on one machine, and goes with it", "name a Ray cluster")
EVALUATED = If("data.held_out_sources!={}", "data.eval_path=null and data.eval_sets={}", "give data.eval_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How rollouts are sampled."""

    temperature: float = 1.0
    """Softmax temperature, above 0; the trainer's log-probabilities use the same one."""
    max_tokens: int = 256
    """Longest response, in tokens."""
    stop_at_eos: bool = True
    """End a response at every end-of-sequence token that the model's generation_config.json, config.json or tokenizer
    names. false: sample exactly max_tokens, or up to one of the stops below."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, such as ["</answer>"]. The token that completes one is the last; it is trained and in
    what rewards see, text after the stop included that is part of this token. Engines then load the tokenizer."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a response, by id. The token itself is the last of the response."""
    seed: int | None = None
    """Gives each response random numbers of its own: of this seed, the number of its group and its place in the group,
    whichever engine samples it. null: engines draw from one stream each, which on GPUs is much faster."""

    def __post_init__(self) -> None:
        at_least(0, "rollout.sampling", self, "temperature")
        at_least(1, "rollout.sampling", self, "max_tokens")
        require(all(self.stop), "rollout.sampling.stop has an empty text, which every response begins with; remove it")
        for text in self.stop:
            require(
                re.search(r"\\[nrt](?![a-z])", text) is None,
                f'rollout.sampling.stop has "{text}", a backslash and a letter, which the engine takes as such; for '
                """a line break write $'rollout.sampling.stop=["\\n"]', or "\\n" in a YAML file""",
            )
        for token_id in self.stop_token_ids:
            require(token_id >= 0, f"rollout.sampling.stop_token_ids must be >= 0, got {token_id}")
        at_least(0, "rollout.sampling", self, "seed")

    @property
    def can_end_early(self) -> bool:
        """Whether a response may have fewer than max_tokens."""
        return self.stop_at_eos or bool(self.stop) or bool(self.stop_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSamplingConfig:
    """How evaluations sample, where not as rollout.sampling. Nothing is learnt from their responses, so they may be
    drawn from another distribution than the policy's (docs/parity.md)."""

    temperature: float | None = None
    """Softmax temperature. 0: the likeliest token. null: as rollout.sampling."""
    top_p: float = field(default=1.0, metadata=read_if(DRAWN))
    """Nucleus bound. 1: none."""
    top_k: int = field(default=0, metadata=read_if(DRAWN))
    """Sample among the k likeliest tokens. 0: among all."""
    seed: int | None = field(default=None, metadata=read_if(DRAWN))
    """Give each response random numbers of its own, the same in every evaluation: of this seed, the prompt and the
    number of the response. null: as rollout.sampling."""

    def __post_init__(self) -> None:
        at_least(0, "rollout.eval", self, "temperature", "seed")
        require(0 < self.top_p <= 1, f"rollout.eval.top_p must lie in (0, 1], got {self.top_p}")
        require(self.top_k >= 0, f"rollout.eval.top_k must be >= 0, got {self.top_k}; 0: all tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSampling(SamplingConfig):
    """How a response of an evaluation is asked for: the run's sampling, with what rollout.eval says of its own."""

    drawing: EvalSamplingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesConfig:
    """Episodes of an agent (rollout.agent). Ignored without one."""

    max_turns: int = 32
    """The most responses in one episode."""
    max_tokens: int | None = None
    """The most sampled tokens in one episode. null: max_turns * rollout.sampling.max_tokens."""
    timeout_s: float = 600.0
    """If an episode takes longer, it is ended, left out of training and counted."""
    blocked_s: ClassVar[float] = 30.0
    """If the event loop of an agent process does not turn for so long, it is replaced; its episodes are lost."""
    num_processes: int = 1
    """Processes that run agents. One runs thousands of episodes that wait, and as much Python as one core can."""
    env: tuple[str, ...] = ()
    """Names of environment variables that an agent gets, such as [SEARCH_API_KEY]; their values are never written into
    the run folder. It also gets PATH, HOME, the locale and what its libraries need, but no other variable."""
    tool_parser: str | None = None
    """vLLM's parser of the model's tool calls, such as hermes or qwen3_coder. null: requests with tools are refused."""
    address: str = "127.0.0.1:0"
    """HOST:PORT at which the endpoint listens (OpenAI's protocol); port 0: any that is free. Every request needs its
    episode's key, but nothing is encrypted."""

    def __post_init__(self) -> None:
        at_least(1, "rollout.episodes", self, "max_turns", "num_processes", "max_tokens")
        above(0, "rollout.episodes", self, "timeout_s")
        require(
            re.fullmatch(r"[^/]+:[0-9]{1,5}", self.address) is not None and self.host_and_port[1] < 1 << 16,
            f"rollout.episodes.address must be HOST:PORT, such as 0.0.0.0:8100, got {self.address!r}",
        )

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The rollout workers: one vLLM engine each."""

    num_workers: int | str = 1
    """Engines (replicas). MIN..MAX, such as 1..4: as many as machines have room for, at least MIN, and more and fewer
    as machines of the Ray cluster come and go (docs/elastic.md)."""
    tp_size: int = 1
    """Tensor-parallel size of one engine; an engine uses tp_size devices. It must divide attention heads, feed-forwards
    and the vocabulary padded to a multiple of 64, and divide the key/value heads or be a multiple of them. With
    block-FP8, a rank's part must be whole blocks."""
    workers_per_gpu: int = field(
        default=1,
        metadata=read_if(
            If("cluster.device!=cpu", cure=ALL_ENGINES),
            If("cluster.share_gpu=false", ": all engines share one GPU", ALL_ENGINES),
        ),
    )
    """Engines on one GPU, for a model so small that an engine waits for its own Python and hardly for the GPU. It must
    divide num_workers, and needs tp_size=1. Each engine decodes its share of the requests."""
    enable_expert_parallel: bool = field(
        default=False,
        metadata=read_if(
            If("rollout.tp_size!=1 or cluster.device=cpu", ": one rank holds all experts", "set rollout.tp_size")
        ),
    )
    """Give each tensor-parallel rank whole experts instead of rows of every expert. GPU only."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    agent: str | None = None
    """An agent that holds whole conversations: `FILE.py:function`, or `package.module:function`, of
    `async def agent(task, session) -> reward or None` (docs/agents.md). null: one response to each prompt."""
    episodes: EpisodesConfig = field(
        default_factory=EpisodesConfig,
        metadata=read_if(If("rollout.agent!=null", ", which samples one response to each prompt", "name an agent")),
    )
    eval: EvalSamplingConfig = field(default_factory=EvalSamplingConfig, metadata=read_if(EVALUATED))
    max_model_len: int = 4096
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int | None = None
    """The most requests that one engine decodes at once. null: as many as a run can have in flight, which is its share
    of max_concurrent_groups or of (algorithm.max_staleness_steps + 1) * algorithm.groups_per_step groups, but 1024 at
    most. vLLM decodes fewer while its KV cache holds no more."""
    max_num_batched_tokens: int = 8192
    """The most tokens of one engine step, at least max_num_seqs. It limits what is prefilled at once, also for the
    requests that a publish of merged weights froze. A publish waits for the steps in flight."""
    gpu_memory_utilization: float = field(
        default=0.85, metadata=read_if(If("cluster.device!=cpu", cure="set rollout.kv_cache_bytes"))
    )
    """Share of a GPU that the engine may take; the engines of workers_per_gpu take it together."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache of one engine rank. null: sized by gpu_memory_utilization (GPU) or 256 MiB (CPU)."""
    enforce_eager: bool = False
    """Skip CUDA graphs and torch.compile. Always on for CPU engines."""
    engine_options: dict[str, Any] = field(default_factory=JsonObject)
    """Further arguments of vLLM's engine, by its names, such as {block_size: 32, async_scheduling: false}; those of
    compilation_config are added to ours. What Slipstream sets, or what would break layouts, exactness or memory, is
    refused. vLLM does not promise that an argument means the same in its next release."""
    max_concurrent_groups: int = 64
    """The most groups in flight over all workers; the buffer's back-pressure may permit fewer."""
    request_timeout_s: float = 600.0
    """If a group takes longer, it is given up, counted and sampled again on another worker, and its worker is taken out
    of service."""
    notice: str | None = field(default=None, metadata=read_if(SPREAD))
    """How a machine is told that it will be taken away: a file that appears there, such as /run/taken, or a URL that
    answers 200 instead of 404, such as http://169.254.169.254/latest/meta-data/spot/instance-action. Its workers then
    hand their requests over, and start on other machines (docs/elastic.md). null: nobody looks."""
    max_restarts: int = 3
    """How often a worker that failed is started again in a run; 0: it stays out of service."""
    restart_backoff_s: ClassVar[float] = 1.0
    """Pause after an attempt to restart a worker that failed; it doubles with every further failure. The first attempt
    comes at once."""

    def __post_init__(self) -> None:
        self._check_num_workers()
        at_least(1, "rollout", self, "tp_size", "workers_per_gpu", "max_model_len")
        at_least(1, "rollout", self, "max_concurrent_groups", "max_num_seqs")
        require(
            self.agent is None or all(self.agent.rpartition(":")),
            f"rollout.agent must be FILE.py:function, package.module:function or null, got {self.agent!r}",
        )
        require(
            all(number % self.workers_per_gpu == 0 for number in self.bounds),
            f"rollout.workers_per_gpu={self.workers_per_gpu} must divide rollout.num_workers={self.num_workers}, the "
            f"number of all engines; set rollout.num_workers={self.workers_per_gpu} for one GPU of engines",
        )
        require(
            self.workers_per_gpu == 1 or self.tp_size == 1,
            f"rollout.workers_per_gpu={self.workers_per_gpu} contradicts rollout.tp_size={self.tp_size}: engines that "
            "share a GPU have one rank each; set one of the two to 1",
        )
        require(
            self.max_num_seqs is None or self.max_num_batched_tokens >= self.max_num_seqs,
            "rollout.max_num_batched_tokens must be >= rollout.max_num_seqs: a step decodes a token of every request; "
            f"got {self.max_num_batched_tokens} and {self.max_num_seqs}",
        )
        above(0, "rollout.sampling", self.sampling, "temperature")
        check_engine_options(self.engine_options)
        require(
            0 < self.gpu_memory_utilization < 1,
            f"rollout.gpu_memory_utilization must lie in (0, 1), got {self.gpu_memory_utilization}",
        )
        require(
            self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
            f"rollout.kv_cache_bytes must be > 0 or null, got {self.kv_cache_bytes}",
        )
        check_notice(self.notice)
        at_least(0, "rollout", self, "max_restarts")
        above(0, "rollout", self, "request_timeout_s")
        require(
            self.sampling.max_tokens < self.max_model_len,
            "rollout.sampling.max_tokens must be < rollout.max_model_len to leave room for a prompt, got "
            f"{self.sampling.max_tokens} and {self.max_model_len}",
        )

    def _check_num_workers(self) -> None:
        given = f"rollout.num_workers={self.num_workers}"
        if not self.is_range:
            require(int(self.num_workers) >= 1, f"rollout.num_workers must be >= 1, got {self.num_workers}")
            return
        require(
            re.fullmatch(r"[0-9]{1,6}\.\.[0-9]{1,6}", str(self.num_workers)) is not None,
            f"rollout.num_workers must be an integer or a range MIN..MAX, such as 2 or 1..4, got {self.num_workers!r}",
        )
        least, most = self.bounds
        require(least >= 1, f"{given}: a run needs at least one rollout worker; write 1..{max(1, most)}")
        require(least <= most, f"{given}: the first number is the fewest; write {most}..{least}")

    @property
    def follows_machines(self) -> bool:
        """Whether workers come and go by themselves."""
        return self.is_range or self.notice is not None

    @property
    def is_range(self) -> bool:
        return isinstance(self.num_workers, str)

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest workers and the most; the same number twice where num_workers is one."""
        least, _, most = str(self.num_workers).partition("..")
        return int(least), int(most or least)

    @property
    def least_workers(self) -> int:
        """Workers without which the run does not start."""
        return self.bounds[0]

    @property
    def most_workers(self) -> int:
        return self.bounds[1]

    @property
    def num_gpus(self) -> int:
        """GPUs of all engines together, where each has a GPU for every rank or workers_per_gpu of them share one; of
        the fewest engines, if num_workers is a range."""
        return self.least_workers * self.tp_size // self.workers_per_gpu

    @property
    def eval_sampling(self) -> EvalSampling:
        own = {name: value for name in ("temperature", "seed") if (value := getattr(self.eval, name)) is not None}
        training = {item.name: getattr(self.sampling, item.name) for item in fields(self.sampling)}
        return EvalSampling(**{**training, **own}, drawing=self.eval)


def check_notice(notice: str | None) -> None:
    """A whole path or a URL of HTTP, without a password."""
    without_password("rollout.notice", notice)
    if notice is None:
        return
    url = urlsplit(notice)
    is_url = url.scheme in ("http", "https") and bool(url.hostname)
    require(
        notice.startswith("/") or is_url,
        f"rollout.notice must be a whole path, such as /run/taken, or a URL, such as http://HOST/PATH, got {notice!r}",
    )
