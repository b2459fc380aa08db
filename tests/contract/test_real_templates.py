"""Locks: over the chat templates of models that people train, what is trained is, id for id, what the engine was given
and what it sampled, whatever an agent does to its history.

Templates (tests/cases/chat_templates), transformers' rendering, byte-level BPE and vLLM's tool parsers are real; the
vocabulary is a small one with the family's special tokens. A drawn engine samples ids that no tokenizer would write,
thinking, calls of tools in other spellings, and cuts responses off. A real one has a random model, which says nonsense;
transformers is the oracle of its log-probabilities. All its experts are used by each token: no choice between two of
nearly equal weight can differ between the two.
"""

import asyncio
import itertools
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from fakes.one_worker import MAX_LOGPROB_ERROR, Checkpoints, one_worker
from fakes.template_tokenizer import NUM_WORDS, QWEN, QWEN_PLAIN, save_template_tokenizer
from tokenizers import Tokenizer

from slipstream.conf.schema import RolloutConfig, SamplingConfig
from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.agents.episode import Episode, Limits, Sampled
from slipstream.rollout.branches import Branch, branches_of, context_of
from slipstream.rollout.types import Prompt, Rollout, Turn
from slipstream.rollout.worker import RolloutWorker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True)
class Family:
    """How a family's models end a turn and write calls."""

    template: str
    specials: tuple[str, ...]
    """The first ends a turn."""
    parser: str | None
    calls: tuple[str, ...]
    """A call in the template's spelling and in another one."""
    continues: bool = True
    """Whether an answer to a user can be followed by another message without a branch."""
    ends: int = 1
    """How many of the special tokens end a turn."""
    thought: str = ""
    """How its models begin an answer, thinking included."""
    plain: tuple[str, ...] = ()
    """Further added tokens, which are not special."""

    def chat(self, folder: Path) -> FolderChatText:
        """With its tokenizer, which is written there."""
        save_template_tokenizer(folder, self.template, self.specials, self.plain)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return FolderChatText(folder, [tokenizer.token_to_id(text) for text in self.specials[: self.ends]], self.parser)


HERMES = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>',
    '<tool_call>{"arguments":{"b":"x y","a":1},"name":"add"}</tool_call>',
)
DEEPSEEK = tuple(
    f"<｜{name.replace(' ', chr(0x2581))}｜>"
    for name in (
        "end of sentence", "begin of sentence", "User", "Assistant", "tool calls begin", "tool calls end", "tool sep",
        "tool call begin", "tool call end", "tool outputs begin", "tool outputs end", "tool output begin",
        "tool output end",
    )
)  # fmt: skip
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
GLM_CALL = "<tool_call>add\n{}{}</tool_call>"
GLM_ARGUMENTS = tuple(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in (("a", "1"), ("b", "x y"))
)
FAMILIES = {
    "qwen3": Family("qwen3", QWEN, "hermes", HERMES, thought="<think>\nhm, so\n</think>\n\n", plain=QWEN_PLAIN),
    "qwen3-2507": Family("qwen3_instruct_2507", QWEN, "hermes", HERMES, plain=QWEN_PLAIN),
    "llama": Family(
        "llama3_1",
        ("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        "llama3_json",
        ('{"name": "add", "parameters": {"a": 1, "b": "x y"}}', '{"parameters":{"b":"x y","a":1},"name":"add"}'),
        ends=2,
    ),
    "glm": Family(
        "glm4moe",
        ("<|user|>", "<|observation|>", "<|endoftext|>", "<|system|>", "<|assistant|>", "[gMASK]", "<sop>"),
        "glm45",
        (GLM_CALL.format(*GLM_ARGUMENTS), GLM_CALL.format(*reversed(GLM_ARGUMENTS))),
        ends=3,
        thought="\n<think>hm, so</think>\n",
        plain=(*QWEN_PLAIN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "gpt-oss": Family(
        "gptoss",
        ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        None,
        ("<|channel|>final<|message|>",),
        ends=2,
        continues=False,
        thought="<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "deepseek-v3": Family(
        "deepseekv3",
        DEEPSEEK[:2],
        "deepseek_v3",
        continues=False,
        thought="hm\n</think>\n\n",
        calls=(DEEPSEEK_CALL.format('{"a": 1, "b": "x y"}'), DEEPSEEK_CALL.format('{"b":"x y","a":1}')),
        plain=(*DEEPSEEK[2:], *QWEN_PLAIN[:2]),
    ),
    "deepseek-r1": Family(
        "deepseek_r1_distill",
        DEEPSEEK[:2],
        None,
        (),
        continues=False,
        thought="hm\n</think>\n\n",
        plain=(*DEEPSEEK[2:], *QWEN_PLAIN[:2]),
    ),
}


@dataclass
class Requests:
    """Stands in for an engine: answers the tokens of one conversation with a response."""

    answer: Callable[[list[int]], Awaitable[Rollout]]
    given: list[list[int]] = field(default_factory=list)
    said: list[Rollout] = field(default_factory=list)
    contexts: dict[int, tuple[int | None, list[int]]] = field(default_factory=dict)

    async def generate(self, parent: int | None, token_ids: list[int], max_tokens: int) -> Sampled:
        number = len(self.given)
        self.given.append([*context_of(self.contexts, parent), *token_ids])
        said = await self.answer(self.given[-1])
        self.said.append(said)
        self.contexts[number] = (parent, [*token_ids, *said.token_ids])
        return Sampled(number, list(said.token_ids), list(said.logprobs), said.finish_reason)

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

    def trained(self, rollout: Rollout) -> list[tuple[Branch, slice]]:
        """Every response once: the sequence in which it counts, and where. It is what was sampled, after what was
        given."""
        found: dict[int, tuple[Branch, slice]] = {}
        for branch in branches_of(Prompt(0, (), ""), rollout):
            counted = zip(
                (at for at, counts in enumerate(branch.counts) if counts), branch.policy_versions, strict=True
            )
            for request, run in itertools.groupby(counted, key=lambda pair: pair[1]):
                places, said = [place for place, _ in run], self.said[request]
                own = slice(places[0], places[0] + len(said.token_ids))
                assert request not in found and places == list(range(own.start, own.stop))
                assert branch.token_ids[: own.start] == self.given[request]
                assert branch.token_ids[own] == list(said.token_ids) and branch.logprobs[own] == list(said.logprobs)
                found[request] = branch, own
        assert sorted(found) == list(range(len(self.given))), "every response is trained once"
        return list(found.values())


def drawn(chat: FolderChatText, family: Family, draw: random.Random) -> Callable[[list[int]], Awaitable[Rollout]]:
    """An engine's answers."""

    async def answer(_: list[int]) -> Rollout:
        parts = [
            draw.choice(["", family.thought, family.thought, "<think>hm</think>", "hm</think>"]),
            draw.choice(["", "first ", "so\n\n 12345 it's", "é {x} "]),
            draw.choice(["", "", *family.calls]),
        ]
        tokens = [token for part in parts for token in chat.encode(part)]
        if draw.random() < 0.5:  # in ids that encode() would not write
            tokens[draw.randrange(len(tokens) + 1) :] += [draw.randrange(256) for _ in range(draw.randrange(4))]
        end = draw.choice(list(chat.stop_texts))
        return response([*tokens, end] if draw.random() < 0.8 or not tokens else tokens, -draw.random())

    return answer


def response(tokens: list[int], logprob: float = -0.5) -> Rollout:
    return Rollout(tokens, [logprob] * len(tokens), [0] * len(tokens), "", "stop")


async def hold(episode: Episode, draw: random.Random, num_turns: int) -> None:
    """A conversation, with what agents do to histories."""
    tools = TOOLS if draw.random() < 0.6 else []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    if draw.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "You are."})
    first = list(messages)
    for _ in range(num_turns):
        answer = await episode.chat(messages, tools)
        reply = answer.reply.message
        follow = {"role": "user", "content": draw.choice(["more", " and\n", "é?"])}
        match draw.choice(["on", "on", "on", "edit", "cut", "again", "other", "framework"]):
            case "edit":
                reply = {"role": "assistant", "content": "edited"}
            case "cut":
                messages = list(first)
            case "again":
                continue
            case "other":
                messages = [{"role": "user", "content": "other"}]
                continue
            case "framework" if reply.get("tool_calls"):
                calls = [dict(call) for call in reply["tool_calls"]]
                for call in calls:
                    arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
                    call["function"] = {**call["function"], "arguments": arguments}
                reply = {**reply, "tool_calls": calls}
        messages = [*messages, reply]
        if reply.get("tool_calls"):
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in reply["tool_calls"]]
        else:
            messages.append(follow)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, FolderChatText]:
    family = FAMILIES[request.param]
    return family, family.chat(tmp_path_factory.mktemp(family.template))


def episode_of(chat: FolderChatText, requests: Requests) -> Episode:
    limits = Limits(max_turns=20, max_tokens=10_000, max_turn_tokens=200, max_model_len=20_000)
    return Episode(chat, limits, requests.generate)


async def test_what_is_trained_is_what_the_engine_was_given_and_sampled(model: tuple[Family, FolderChatText]) -> None:
    """30 conversations for each of seven templates."""
    family, chat = model
    reasons = set[str]()
    for seed in range(30):
        requests = Requests(drawn(chat, family, random.Random(seed)))
        episode = episode_of(chat, requests)
        await hold(episode, random.Random(seed), 6)
        rollout = requests.rollout(episode)
        assert len(requests.trained(rollout)) == 6
        reasons |= {turn.reason for turn in rollout.turns}
    assert {"start", "edited", "fork", "new", "" if family.continues else "template"} <= reasons


async def test_thinking_a_call_and_its_result_are_one_sequence(model: tuple[Family, FolderChatText]) -> None:
    """In every spelling of the call, where the family's template keeps an answer that calls a tool as it was said."""
    family, chat = model
    for call in family.calls if family.parser else ():
        end = family.specials[1] if family.template == "glm4moe" else family.specials[0]
        says = [f"{family.thought}{call}{end}", f"{family.thought}3{family.specials[0]}"]

        async def answer(_: list[int], says: list[str] = says) -> Rollout:
            return response(chat.encode(says.pop(0)))

        requests = Requests(answer)
        episode = episode_of(chat, requests)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 2?"}]
        reply = (await episode.chat(messages, TOOLS)).reply
        (made,) = reply.tool_calls
        messages += [reply.message, {"role": "tool", "tool_call_id": made["id"], "content": "3"}]
        await episode.chat(messages, TOOLS)
        rendered = chat.render(messages, TOOLS)
        assert "None" not in rendered.rpartition("1 + 2?")[2], "no content is not the text None"
        assert [turn.reason for turn in episode.turns] == ["start", "" if family.continues else "template"]
        assert (
            (call in chat.decode(requests.given[1])) if family.continues else requests.given[1] == chat.encode(rendered)
        )


async def test_a_call_that_does_not_parse_leaves_no_traceback_in_the_log(
    model: tuple[Family, FolderChatText], caplog: pytest.LogCaptureFixture
) -> None:
    family, chat = model
    vllm = logging.getLogger("vllm")
    vllm.addHandler(caplog.handler)  # it hands nothing to the root logger
    try:
        for call in family.calls if family.parser else ():
            chat.reply(chat.encode(call.replace('"add"', "add").replace("{", "{{")), TOOLS)
    finally:
        vllm.removeHandler(caplog.handler)
    assert [record.name for record in caplog.records if record.exc_info] == []


SEEDS = range(5, 13)
"""Each draws a conversation for each of seven templates: answers are edited, cut, asked again and begun anew."""
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
        assert (await one.publish(0)).replicas[0].error is None
        yield checkpoints, one.worker


async def test_what_is_trained_has_the_engines_tokens_and_transformers_log_probabilities(
    served: tuple[Checkpoints, RolloutWorker], model: tuple[Family, FolderChatText]
) -> None:
    (checkpoints, worker), chat = served, model[1]

    async def answer(given: list[int]) -> Rollout:
        return (await worker.generate_group(Prompt(0, tuple(given), ""), 1, sampling=SHORT))[0]

    async def converse(seed: int) -> tuple[Requests, Rollout]:
        requests = Requests(answer)
        episode = episode_of(chat, requests)
        await hold(episode, random.Random(seed), 4)
        return requests, requests.rollout(episode)

    reasons = set[str]()
    for requests, rollout in await asyncio.gather(*map(converse, SEEDS)):
        for branch, own in requests.trained(rollout):
            with torch.no_grad():
                logits_TV = checkpoints.model(0)(torch.tensor([branch.token_ids])).logits[0].float()
            expected_T = torch.log_softmax(logits_TV[:-1], -1).gather(1, torch.tensor(branch.token_ids)[1:, None])[:, 0]
            error_T = expected_T[own.start - 1 : own.stop - 1] - torch.tensor(branch.logprobs[own])
            assert error_T.abs().max() < MAX_LOGPROB_ERROR
        reasons |= {turn.reason for turn in rollout.turns}
    assert {"start", "edited", "new"} <= reasons
