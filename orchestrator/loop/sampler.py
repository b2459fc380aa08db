"""Prompts to judged groups: those that the train loop waits for, and those of an evaluation.

    tickets, prompts --> a place --> least loaded replica --> reward --> informative? --> teacher? --> GroupBuffer
                                              ^                               | no: another prompt
                                              +-------------------------------+

Owns: how many groups of both kinds are in flight (`rollout.max_concurrent_groups`), dynamic sampling, and when sampling
has become pointless: the teacher fails on every response, or all groups have equal rewards; the reward or the agent
fails on every one (alarms.py). Does not own: when an evaluation is due (controller), which group belongs to which batch
(buffer), who serves (supervisor).
Invariant: a failure to sample ends `run`; the buffer raises it between two steps, and nothing else does.
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from slipstream.conf.schema import RunConfig, SamplingConfig
from slipstream.fleet.waiting import together, wait_for
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.files.timeline import REWARDS
from slipstream.orchestrator.loop.alarms import Unjudged, most_in_a_row
from slipstream.orchestrator.loop.buffer import GroupBuffer, Ticket
from slipstream.orchestrator.loop.ports import LoopServices
from slipstream.orchestrator.metrics.held_out import is_informative
from slipstream.rollout.agents.episode_runner import FinishedEpisode
from slipstream.rollout.rewards.shaping import shape
from slipstream.rollout.types import Group, Judgement, Prompt


class Sampler:
    def __init__(self, config: RunConfig, services: LoopServices, buffer: GroupBuffer) -> None:
        self._config = config
        self._services = services
        self._buffer = buffer
        self._places = asyncio.Semaphore(config.rollout.max_concurrent_groups)
        self.num_generated = 0
        """Groups sampled and judged, whatever became of them."""
        self.num_uninformative = 0
        """Groups among them that were replaced because their rewards were all equal."""
        self._num_uninformative_in_a_row = 0
        self._unjudged = Unjudged(config, services.episodes)
        """Counts the groups that train."""
        self.unjudged_of_all = Unjudged(config, services.episodes)
        """Counts those of evaluations, too."""
        self._num_untaught_in_a_row = 0

    async def run(self) -> None:
        """Keep as many groups in flight as tickets and places allow, until cancelled.

        consumes: tickets, prompts     waits for: a place, a ticket     unblocked by: a delivered group, open_next
        """
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    ticket = await self._buffer.claim_ticket()
                    # Nothing is awaited between ticket and prompt: a checkpoint must not see one without the other.
                    prompt = ticket.prompt or self._draw(ticket)
                    await self._places.acquire()
                    groups.create_task(self._sample_into(ticket, prompt))
        except* Exception as errors:  # noqa: BLE001 - nobody awaits this task: the train loop raises it instead
            await self._buffer.fail(errors.exceptions[0])

    async def evaluate(self, version: int | None = None) -> dict[str, list[Group]]:
        """Sample and judge every prompt of every held-out set. `version`: the version to sample from, where replicas
        keep it; None: the one that they serve."""
        config, sets, sampling = self._config, self._services.eval_sets, self._config.rollout.eval_sampling
        # Awaited, it takes the places that training leaves it; beside training it has its own, a share of the engines.
        places = asyncio.Semaphore(config.num_evaluated_groups) if config.evaluates_beside else self._places

        async def one(prompt: Prompt) -> Group:
            async with places:
                own = seeded(sampling, prompt.prompt_id)
                return await self._sample(prompt, config.run.eval_samples_per_prompt, own, version)

        prompts = [prompt for of_set in sets.values() for prompt in of_set]
        groups = iter(
            await wait_for(
                together(*(one(prompt) for prompt in prompts)),
                f"the evaluation of {len(prompts)} prompts",
                timeout_s=self.patience_s,
                progress=lambda: self.num_generated,
            )
        )
        return {name: [next(groups) for _ in of_set] for name, of_set in sets.items()}

    @property
    def patience_s(self) -> float:
        """Longest time in which no group may be finished: every replica may fail once before the last one succeeds."""
        rollout, num_judged = self._config.rollout, self._config.algorithm.group_size
        restart_s = self._config.cluster.start_timeout_s if rollout.max_restarts else 0.0
        requests_s = rollout.request_timeout_s * (rollout.most_workers + 1)
        if rollout.agent is not None:
            requests_s = max(requests_s, rollout.episodes.timeout_s)
        judge_s = self._config.reward.longest_timeout_s
        if self._services.teacher is not None:
            judge_s += self._config.algorithm.teacher.timeout_s
        return requests_s + judge_s * num_judged + restart_s + 60.0

    async def _sample_into(self, ticket: Ticket, prompt: Prompt) -> None:
        """Deliver one group for one ticket. Dynamic sampling goes on to further prompts until rewards differ."""
        algorithm, sampling, attempt = self._config.algorithm, self._config.rollout.sampling, 0
        try:
            while True:
                own = None if sampling.seed is None else seeded(sampling, ticket.number, attempt)
                group = await self._sample(prompt, algorithm.group_size, own)
                self._services.prompts.observe(prompt.prompt_id, group.rewards_for_content)
                self._unjudged.note(group)
                self._unjudged.stop_if_too_many()
                if not algorithm.drop_zero_variance_groups or self._is_informative(group):
                    break
                prompt, attempt = self._draw(ticket), attempt + 1
            await self._buffer.deliver(ticket, await self._taught(group))
        finally:
            self._places.release()

    async def _sample(
        self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None, version: int | None = None
    ) -> Group:
        services = self._services
        if services.episodes is None:
            rollouts = await services.router.generate_group(prompt, n, sampling, version)
            sampled_at = time.time()
            judgements = await services.rewards.score_group(prompt, rollouts)
        else:
            episodes = await services.episodes.run_group(prompt, n, sampling)
            sampled_at = time.time()
            rollouts = [episode.rollout for episode in episodes]
            judgements = await self._judge(prompt, episodes)
        services.activities.note(REWARDS, "judge", sampled_at, prompt.prompt_id)
        self.num_generated += 1
        group = Group(
            prompt,
            rollouts,
            [one.reward for one in judgements],
            [one.parts for one in judgements],
            [one.answer for one in judgements],
        )
        self.unjudged_of_all.note(group)
        return group

    async def _judge(self, prompt: Prompt, episodes: Sequence[FinishedEpisode]) -> list[Judgement]:
        """What agents returned; the run's reward judges the last response of the others, unless they failed."""
        judgements = [self._of_agent(episode) for episode in episodes]
        left = [i for i, episode in enumerate(episodes) if episode.reward is None and not episode.rollout.failure]
        if left:
            scored = await self._services.rewards.score_group(prompt, [episodes[i].rollout for i in left])
            for i, judgement in zip(left, scored, strict=True):
                judgements[i] = judgement
        return judgements

    def _of_agent(self, episode: FinishedEpisode) -> Judgement:
        """What the agent returned, and what the episode's length adds to it."""
        if episode.reward is None:
            return Judgement(None)
        config, num_tokens = self._config, len(episode.rollout.token_ids)
        added: dict[str, float | None] = {**shape(config.reward, num_tokens, config.max_response_tokens)}
        return Judgement(episode.reward + sum(value or 0.0 for value in added.values()), added)

    async def _taught(self, group: Group) -> Group:
        """The group with the teacher's log-probabilities. Where it gave none, the reward is None, so that the response
        is left out. Raises TrainingStopped once it failed on every response of too many groups in a row."""
        teacher = self._services.teacher
        judged = [i for i, reward in enumerate(group.rewards) if reward is not None]
        if teacher is None or not judged:
            return group
        began = time.time()
        found = await teacher.group_logprobs(group.prompt, [group.rollouts[i] for i in judged])
        self._services.activities.note(REWARDS, "teacher", began, group.prompt.prompt_id)
        rollouts, rewards = list(group.rollouts), list(group.rewards)
        for i, logprobs in zip(judged, found, strict=True):
            rollouts[i] = replace(rollouts[i], teacher_logprobs=logprobs)
            rewards[i] = None if logprobs is None else rewards[i]
        is_untaught = all(logprobs is None for logprobs in found)
        self._num_untaught_in_a_row = self._num_untaught_in_a_row + 1 if is_untaught else 0
        if self._num_untaught_in_a_row >= most_in_a_row(self._config):
            raise TrainingStopped(
                f"the teacher, algorithm.teacher.base_url={self._config.algorithm.teacher.base_url}, failed on every "
                f"response of {self._num_untaught_in_a_row} groups in a row; run.log has the first failure of each "
                "kind. Repair it and go on with slipstream resume"
            )
        return replace(group, rollouts=rollouts, rewards=rewards)

    def _draw(self, ticket: Ticket) -> Prompt:
        prompt = next(self._services.prompts)
        self._buffer.assign_prompt(ticket, prompt)
        return prompt

    def _is_informative(self, group: Group) -> bool:
        """Whether its rewards differ, whatever its lengths took from them: else responses that are all right, or all
        wrong, would differ whenever their lengths do. Raises TrainingStopped once too many in a row did not.
        """
        if is_informative(group.rewards_for_content):
            self._num_uninformative_in_a_row = 0
            return True
        self.num_uninformative += 1
        self._num_uninformative_in_a_row += 1
        algorithm = self._config.algorithm
        most = algorithm.max_uninformative_batches * algorithm.groups_per_step
        if self._num_uninformative_in_a_row >= most:
            last = next((f"{reward:g}" for reward in group.rewards if reward is not None), "none")
            raise TrainingStopped(
                f"{self._num_uninformative_in_a_row} groups in a row had equal rewards ({last} in the last one) and "
                "were dropped (algorithm.drop_zero_variance_groups), so that no batch comes together: the prompts are "
                "solved, or out of reach. Give others, and go on with slipstream resume"
            )
        return False


def seeded(sampling: SamplingConfig, *numbers: int) -> SamplingConfig:
    """The same options with the seed of one group, made of rollout.sampling.seed and these numbers."""
    if sampling.seed is None:
        return sampling
    digest = hashlib.blake2b(repr((sampling.seed, *numbers)).encode(), digest_size=6).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big"))
