"""Conversations under the chat templates of models that people train, with a real engine: what is trained is what the
engine was given and sampled, and the log-probability that came with each token is transformers' for that sequence.

Locks what test_real_templates.py leaves to a drawn engine: its conversations, answers edited, cut, asked again or begun
anew, with tools and without. The model is random, so it says nonsense and calls no tool. Its experts are all used by
each token: no choice between two of nearly equal weight can differ between the engine and the oracle.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from contract.test_real_templates import FAMILIES, hold
from fakes.one_worker import MAX_LOGPROB_ERROR, Checkpoints, one_worker
from fakes.template_tokenizer import NUM_WORDS, save_template_tokenizer
from tokenizers import Tokenizer

from slipstream.conf.schema import RolloutConfig, SamplingConfig
from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.agents.episode import Episode, Limits, Sampled
from slipstream.rollout.branches import branches_of, context_of
from slipstream.rollout.types import Prompt, Rollout, Turn
from slipstream.rollout.worker import RolloutWorker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

SEEDS = range(5, 13)
"""Each draws a conversation for each of seven templates: answers are edited, cut, asked again and begun anew."""
TURNS = 4
MAX_MODEL_LEN = 4096
VOCAB_SIZE = NUM_WORDS + 40
"""More than any family's tokenizer has, as published models have."""
SHORT = SamplingConfig(max_tokens=12)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Checkpoints, RolloutWorker]]:
    """A worker that serves version 0. A turn ends with the first special token of each family, which is one id."""
    folder = tmp_path_factory.mktemp("templates")
    checkpoints = Checkpoints(
        folder, vocab_size=VOCAB_SIZE, eos_token_id=NUM_WORDS, max_position_embeddings=MAX_MODEL_LEN,
        num_experts=2, num_experts_per_tok=2,
    )  # fmt: skip
    config = RolloutConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=32, kv_cache_bytes=256 << 20, sampling=SHORT)
    async with one_worker(folder, checkpoints, config) as one:
        report = await one.publish(0)
        assert report.replicas[0].error is None
        yield checkpoints, one.worker


@dataclass
class Asked:
    """The requests of one conversation, as the engine got them and answered them."""

    worker: RolloutWorker
    contexts: dict[int, tuple[int | None, list[int]]] = field(default_factory=dict)
    given: list[list[int]] = field(default_factory=list)
    said: list[Rollout] = field(default_factory=list)

    async def generate(self, parent: int | None, token_ids: list[int], max_tokens: int) -> Sampled:
        """Sample one response to a context and what comes after it."""
        given = [*context_of(self.contexts, parent), *token_ids]
        (rollout,) = await self.worker.generate_group(Prompt(0, tuple(given), ""), 1, sampling=SHORT)
        number = len(self.given)
        self.given.append(given)
        self.said.append(rollout)
        self.contexts[number] = (parent, [*token_ids, *rollout.token_ids])
        return Sampled(number, list(rollout.token_ids), list(rollout.logprobs), rollout.finish_reason)

    def rollout(self, episode: Episode) -> Rollout:
        """As the controller makes it; a token's version stands for its request."""
        turns = []
        for told in episode.turns:
            new, said = self.contexts[told.request][1], self.said[told.request].token_ids
            turns.append(Turn(told.parent, new[: len(new) - len(said)], len(said), told.reason))
        order = [told.request for told in episode.turns]
        return Rollout(
            [token for request in order for token in self.said[request].token_ids],
            [value for request in order for value in self.said[request].logprobs],
            [request for request in order for _ in self.said[request].token_ids],
            "", "stop", turns=tuple(turns),
        )  # fmt: skip


async def converse(worker: RolloutWorker, chat: FolderChatText, seed: int) -> tuple[Rollout, Asked]:
    """One conversation."""
    asked = Asked(worker)
    limits = Limits(max_turns=20, max_tokens=10_000, max_turn_tokens=200, max_model_len=MAX_MODEL_LEN)
    episode = Episode(seed, chat, limits, asked.generate)
    await hold(episode, random.Random(seed), TURNS)
    return asked.rollout(episode), asked


@pytest.mark.parametrize("name", FAMILIES)
async def test_what_is_trained_has_the_engines_tokens_and_transformers_log_probabilities(
    served: tuple[Checkpoints, RolloutWorker], name: str, tmp_path: Path
) -> None:
    checkpoints, worker = served
    family = FAMILIES[name]
    save_template_tokenizer(tmp_path, family.template, family.specials, family.plain)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    chat = FolderChatText(tmp_path, [tokenizer.token_to_id(family.specials[0])], family.parser)
    held = await asyncio.gather(*(converse(worker, chat, seed) for seed in SEEDS))
    model, compared, worst, reasons = checkpoints.model(0), 0, 0.0, set[str]()
    for rollout, asked in held:
        trained: list[int] = []
        for branch in branches_of(Prompt(0, (), ""), rollout):
            with torch.no_grad():
                logits_TV = model(torch.tensor([branch.token_ids])).logits[0].float()
            expected_T = torch.log_softmax(logits_TV[:-1], -1).gather(1, torch.tensor(branch.token_ids)[1:, None])[:, 0]
            places = [place for place, counts in enumerate(branch.counts) if counts]
            for place, request in zip(places, branch.policy_versions, strict=True):
                if request in trained:
                    continue
                trained.append(request)
                said, given = asked.said[request], asked.given[request]
                own = slice(place, place + len(said.token_ids))
                assert branch.token_ids[:place] == given
                assert branch.token_ids[own] == list(said.token_ids)
                assert branch.logprobs[own] == list(said.logprobs)
                error_T = expected_T[place - 1 : own.stop - 1] - torch.tensor(said.logprobs)
                worst, compared = max(worst, error_T.abs().max().item()), compared + len(said.token_ids)
        assert sorted(trained) == list(range(TURNS)), "every response is trained once"
        reasons |= {turn.reason for turn in rollout.turns}
    print(f"{name}: {compared} tokens, {sorted(reasons)}, largest difference {worst:.1e}")
    assert worst < MAX_LOGPROB_ERROR
    assert {"start", "edited", "new"} <= reasons
