"""The controller's end of a run's agents: groups of episodes, and the tokens that engines sampled for them.

    run_group --> service process --> agents
                    |  parent, new tokens        given = the parent's tokens + the new ones
                    +----------------------> generate(given) --> an engine, through the router
    run_group <-- turns in their order, reward or failure

Owns: the service process, and the tokens, log-probabilities and versions of each request, which stay in this process: a
rollout is made of what the engine was given and what it returned. Does not own: conversations and limits
(episode.py), agents (agent_pool.py), which engine serves (`generate`).
Invariant: run_group() returns one rollout per episode, whatever the agents do. It raises only if the engines are lost,
or the service is.
"""

import asyncio
import hashlib
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from slipstream.conf.failures import in_words, outcome_when_done
from slipstream.conf.functions import keep_copy
from slipstream.conf.json_files import JsonMapping
from slipstream.conf.plural import counted
from slipstream.conf.schema import EpisodesConfig, RunConfig, SamplingConfig
from slipstream.rollout.agents.agent_pool import agent_pool
from slipstream.rollout.agents.episode import Limits, ServiceOptions
from slipstream.rollout.branches import context_of
from slipstream.rollout.channel import Channel, Disconnected
from slipstream.rollout.errors import AgentError, EngineDied
from slipstream.rollout.text.ends import end_token_ids
from slipstream.rollout.text.messages import TEMPLATE_OPTIONS, template_options
from slipstream.rollout.types import Prompt, Rollout, Turn
from slipstream.rollout.user_processes.kept_process import KeptProcess
from slipstream.rollout.user_processes.pool import user_environment
from slipstream.weight_sync.typed_msgpack import pack

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Longest start of the service: its imports, vLLM's for a tool parser, and those of the agent."""

Generate = Callable[[Prompt, SamplingConfig], Awaitable[Rollout]]
"""Samples one response. Raises when no engine will serve any more."""


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    rollout: Rollout
    """`rollout.failure` says why there is no reward; "": none failed."""
    reward: float | None
    """What the agent returned; None without a failure: the run's reward judges the last response."""


@dataclass(slots=True)
class _Open:
    prompt: Prompt
    sampling: SamplingConfig
    ended: asyncio.Future[FinishedEpisode]
    contexts: dict[int, tuple[int | None, list[int]]] = field(default_factory=dict[int, tuple[int | None, list[int]]])
    """Request -> (the parent's request, tokens given and sampled)."""
    sampled: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    """Request -> what the engine returned."""
    num_requests: int = 0

    def next_seed(self) -> int | None:
        self.num_requests += 1
        if self.sampling.seed is None:
            return None
        digest = hashlib.blake2b(repr((self.sampling.seed, self.num_requests)).encode(), digest_size=6).digest()
        return int.from_bytes(digest, "big")


def check_agent(config: RunConfig) -> Path:
    """Import the agent once, in a process of its own, to find out before a run starts whether that works. Returns the
    file that defines it. Raises AgentError: it cannot; the message names the option and the reason."""

    async def start() -> Path:
        episodes = config.rollout.episodes
        environment = agent_environment(episodes, os.environ)
        pool = agent_pool(config.rollout.agent or "", 1, episodes.blocked_s, environment, None)
        try:
            (source,) = await pool.start()
            return Path(source)
        finally:
            await pool.close()

    return asyncio.run(start())


def agent_environment(config: EpisodesConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the agents' processes. Raises: AgentError, where rollout.episodes.env names no variable."""
    return user_environment("rollout.episodes.env", config.env, environ, AgentError)


class EpisodeRunner:
    """See the module's docstring. All methods belong to one event loop. `log_path` is for what the service and agents
    print; a copy of the file that defines the agent goes beside it."""

    def __init__(self, config: RunConfig, folder: Path, *, log_path: Path | None) -> None:
        self._config = config
        self._folder = folder
        self._log_path = log_path
        self._kept: KeptProcess | None = None
        self._listening: asyncio.Task[None] | None = None
        self._lost: EngineDied | None = None
        """Why the service is not listened to any more."""
        self._generate: Generate | None = None
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._reported: set[str] = set()
        self.first_report = ""
        """What the first episode that failed reported: for an exception, the end of its traceback."""

    async def start(self) -> str:
        """Start the service and the agents. Returns the endpoint's base URL. Raises AgentError: the agent cannot be set
        up, or the endpoint cannot listen."""
        options = self._options()
        self._kept = kept = await KeptProcess.start(
            "slipstream.rollout.agents.service",
            environment={**os.environ, "PYTHONPATH": options.environment["PYTHONPATH"]},
            log_path=self._log_path,
        )
        channel = kept.channel
        channel.send(pack(options))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                kind, *rest = await channel.receive()
        except (TimeoutError, Disconnected) as e:
            raise AgentError(f"the process of the agents did not start; agents.log has the reason: {e}") from e
        if kind == "refused":
            raise AgentError(rest[0])
        base_url, source = rest
        logger.info("agents: %s; their endpoint is %s", counted(options.episodes.num_processes, "process"), base_url)
        copy = None if self._log_path is None else self._log_path.with_name("agent_source.py")
        keep_copy(f"rollout.agent={self._config.rollout.agent}", Path(source), copy)
        self._listening = asyncio.create_task(self._listen(channel))
        return base_url

    def sample_with(self, generate: Generate) -> None:
        """What samples from now on. Call it before run_group()."""
        self._generate = generate

    async def run_group(self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None) -> list[FinishedEpisode]:
        """Run `n` episodes of one prompt at once, by rollout.sampling unless told otherwise. Raises Exception: what
        `generate` raised: no engine is left; EngineDied: the service is gone."""
        if self._lost is not None:
            raise self._lost
        sampling = sampling or self._config.rollout.sampling
        seeds = [None if sampling.seed is None else sampling.seed + index for index in range(n)]
        numbers = [self._begin(prompt, replace(sampling, seed=seed)) for seed in seeds]
        try:
            return list(await asyncio.gather(*(self._open[number].ended for number in numbers)))
        finally:
            for number in numbers:
                if self._open.pop(number, None) is not None:
                    self._send(["cancel", number])

    async def close(self) -> None:
        """End the service, the agents, and everything that they started. Idempotent."""
        if self._listening is not None:
            self._listening.cancel()
        for request in self._requests.values():
            request.cancel()
        if self._kept is not None:
            await self._kept.end()

    def _options(self) -> ServiceOptions:
        rollout, episodes = self._config.rollout, self._config.rollout.episodes
        return ServiceOptions(
            agent=rollout.agent or "",
            folder=self._folder,
            stop_token_ids=[*end_token_ids(self._folder), *rollout.sampling.stop_token_ids],
            sampling=rollout.sampling,
            episodes=episodes,
            limits=Limits(
                max_turns=episodes.max_turns,
                max_tokens=self._config.max_response_tokens,
                max_turn_tokens=rollout.sampling.max_tokens,
                max_model_len=rollout.max_model_len,
            ),
            blocked_s=episodes.blocked_s,
            environment=agent_environment(episodes, os.environ),
            log_path=self._log_path,
        )

    def _begin(self, prompt: Prompt, sampling: SamplingConfig) -> int:
        number = next(self._numbers)
        self._open[number] = _Open(prompt, sampling, asyncio.get_running_loop().create_future())
        task = {**prompt.fields, "prompt": prompt.text if prompt.messages is None else prompt.messages}
        own = template_options(prompt.fields.get(TEMPLATE_OPTIONS))
        self._send(["episode", number, task, {**self._config.data.chat_template_kwargs, **own}])
        return number

    def _send(self, message: Sequence[object]) -> None:
        if self._kept is not None:
            self._kept.channel.send(message)

    async def _listen(self, channel: Channel) -> None:
        """Do what the service asks for, until it is gone. From then on nobody ends an episode: those that go on fail,
        and so does each that would begin."""
        end = await outcome_when_done(self._obey(channel))
        how = "is gone" if isinstance(end, Disconnected) else f"is not understood ({in_words(end)})"
        self._lost = EngineDied(f"the process of the agents (endpoint and conversations) {how}; see agents.log")
        for episode in self._open.values():
            if not episode.ended.done():
                episode.ended.set_exception(self._lost)

    async def _obey(self, channel: Channel) -> NoReturn:
        """Do what the service says, until Disconnected is raised."""
        while True:
            message = await channel.receive()
            match message:
                case ["generate", request, episode, parent, token_ids, max_tokens]:
                    if episode in self._open:
                        work = self._sample(request, self._open[episode], parent, token_ids, max_tokens)
                        task = self._requests[request] = asyncio.create_task(work)
                        task.add_done_callback(lambda _, request=request: self._requests.pop(request, None))
                case ["drop", request]:
                    if request in self._requests:
                        self._requests[request].cancel()
                case ["told", text]:
                    logger.warning("%s", text)
                case ["ended", number, said]:
                    if number in self._open:
                        self._finish(self._open[number], said)
                case _:
                    raise AssertionError(f"the service said {message!r:.100}")

    async def _sample(
        self, request: int, episode: _Open, parent: int | None, given: list[int], max_tokens: int
    ) -> None:
        """One request of an episode. The engine is given the parent's tokens and the new ones."""
        assert self._generate is not None, "sample_with() comes first"
        prompt = Prompt(episode.prompt.prompt_id, (*context_of(episode.contexts, parent), *given), "")
        sampling = replace(episode.sampling, max_tokens=max_tokens, seed=episode.next_seed())
        rollout = await outcome_when_done(self._generate(prompt, sampling))
        if isinstance(rollout, Exception):  # no engine is left: whoever waits for the group ends the run
            if not episode.ended.done():
                episode.ended.set_exception(rollout)
            self._send(["failed", request, in_words(rollout)])
            return
        episode.contexts[request] = (parent, [*given, *rollout.token_ids])
        episode.sampled[request] = rollout
        self._send(["sampled", request, rollout.token_ids, rollout.logprobs, rollout.finish_reason])

    def _finish(self, episode: _Open, said: JsonMapping) -> None:
        if episode.ended.done():
            return
        if said["failure"]:
            self._report_once(said, episode.prompt)
        turns: list[Turn] = []
        parts: list[Rollout] = []
        for told in said["turns"]:
            request, parent = told["request"], told["parent"]
            parent_request, tokens = episode.contexts[request]
            part = episode.sampled[request]
            given = tokens[: len(tokens) - len(part.token_ids)]
            num_before = len(context_of(episode.contexts, parent_request))
            # The parent has those of all its tokens but the last.
            routes = None if part.routes is None else part.routes.at(slice(max(num_before - 1, 0), None))
            turns.append(Turn(parent, given, len(part.token_ids), told["reason"], told["given"], told["said"], routes))
            parts.append(part)
        text = said["text"]
        if parts and self._config.reward.keep_special_tokens:
            text = turns[-1].said
        rollout = Rollout(
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[logprob for part in parts for logprob in part.logprobs],
            policy_versions=[version for part in parts for version in part.policy_versions],
            text=text,
            finish_reason=said["finish_reason"],
            num_evictions=sum(part.num_evictions for part in parts),
            turns=tuple(turns),
            failure=said["failure"],
            seconds=said["seconds"],
        )
        episode.ended.set_result(FinishedEpisode(rollout, said["reward"]))

    def _report_once(self, said: JsonMapping, prompt: Prompt) -> None:
        """Log the first failure of each kind in full (for exceptions: of each class and place). Count the others."""
        self.first_report = self.first_report or said["report"]
        key = f"{said['failure']}: {said['place']}"
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(
                "an episode failed (%s) on prompt %d and is left out; more of this kind are only counted:\n%s",
                said["failure"], prompt.prompt_id, said["report"],
            )  # fmt: skip
