"""Locks: over the chat templates of models that people train, what is trained is, id for id, what the engine was given
and what it sampled, whatever an agent does to its history.

Templates (tests/cases/chat_templates), transformers' rendering, byte-level BPE and vLLM's tool parsers are real; the
vocabulary is a small one with the family's special tokens. The engine is random: it samples ids that no tokenizer would
write, thinking, calls of tools in other spellings, and it cuts responses off.
"""

import asyncio
import json
import logging
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes.template_tokenizer import QWEN, QWEN_PLAIN, save_template_tokenizer
from tokenizers import Tokenizer

from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.agents.episode import Episode, Limits, Sampled
from slipstream.rollout.branches import branches_of, context_of
from slipstream.rollout.types import Prompt, Rollout, Turn

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


HERMES = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>',
    '<tool_call>{"arguments":{"b":"x y","a":1},"name":"add"}</tool_call>',
)
DEEPSEEK = tuple(
    f"<｜{name.replace(' ', chr(0x2581))}｜>"
    for name in (
        *(
            "end of sentence",
            "begin of sentence",
            "User",
            "Assistant",
            "tool calls begin",
            "tool calls end",
            "tool sep",
        ),
        *("tool call begin", "tool call end", "tool outputs begin", "tool outputs end"),
        *("tool output begin", "tool output end"),
    )
)
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
class Engine:
    """Samples at random, and remembers every request."""

    chat: FolderChatText
    family: Family
    draw: random.Random
    contexts: dict[int, tuple[int | None, list[int]]] = field(default_factory=dict)
    given: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    vocab_size: int = 600

    async def generate(self, parent: int | None, token_ids: list[int], max_tokens: int) -> Sampled:
        number = len(self.given)
        self.given.append([*context_of(self.contexts, parent), *token_ids])
        tokens = self._say()
        self.sampled.append(tokens)
        self.contexts[number] = (parent, [*token_ids, *tokens])
        return Sampled(number, tokens, [-0.01 * number] * len(tokens), "stop")

    def _say(self) -> list[int]:
        draw, family = self.draw, self.family
        parts = [
            draw.choice(["", family.thought, family.thought, "<think>hm</think>", "hm</think>"]),
            draw.choice(["", "first ", "so\n\n 12345 it's", "é {x} "]),
            draw.choice(["", "", *family.calls]),
        ]
        tokens = [token for part in parts for token in self.chat.encode(part)]
        if draw.random() < 0.5:  # in ids that encode() would not write
            tokens[draw.randrange(len(tokens) + 1) :] += [draw.randrange(256) for _ in range(draw.randrange(4))]
        end = draw.choice(list(self.chat.stop_texts))
        return [*tokens, end] if draw.random() < 0.8 or not tokens else tokens


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
    folder = tmp_path_factory.mktemp(family.template)
    save_template_tokenizer(folder, family.template, family.specials, family.plain)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(text) for text in family.specials[: family.ends]]
    return family, FolderChatText(folder, ends, family.parser)


def an_episode(model: tuple[Family, FolderChatText], seed: int) -> tuple[Episode, Engine]:
    family, chat = model
    engine = Engine(chat, family, random.Random(seed))
    limits = Limits(max_turns=20, max_tokens=10_000, max_turn_tokens=200, max_model_len=20_000)
    return Episode(seed, chat, limits, engine.generate), engine


def rollout_of(episode: Episode, engine: Engine) -> Rollout:
    """As the controller makes it."""
    turns = []
    for told in episode.turns:
        tokens, sampled = engine.contexts[told.request][1], engine.sampled[told.request]
        turns.append(Turn(told.parent, tokens[: len(tokens) - len(sampled)], len(sampled), told.reason))
    requests = [told.request for told in episode.turns]
    return Rollout(
        [token for request in requests for token in engine.sampled[request]],
        [-0.01 * request for request in requests for _ in engine.sampled[request]],
        [request for request in requests for _ in engine.sampled[request]],
        "", "stop", turns=tuple(turns),
    )  # fmt: skip


def test_what_is_trained_is_what_the_engine_was_given_and_sampled(model: tuple[Family, FolderChatText]) -> None:
    """30 conversations for each of seven templates."""
    reasons: dict[str, int] = {}
    for seed in range(30):
        episode, engine = an_episode(model, seed)
        asyncio.run(hold(episode, random.Random(seed), 6))
        rollout = rollout_of(episode, engine)
        counted: list[int] = []
        for branch in branches_of(Prompt(0, (), ""), rollout):
            versions, place = iter(branch.policy_versions), 0
            while place < len(branch.token_ids):
                if not branch.counts[place]:
                    place += 1
                    continue
                request = next(versions)  # the version stands for the request
                sampled = engine.sampled[request]
                assert branch.token_ids[:place] == engine.given[request]
                assert branch.token_ids[place : place + len(sampled)] == sampled
                assert all(branch.counts[place : place + len(sampled)])
                assert branch.logprobs[place : place + len(sampled)] == [-0.01 * request] * len(sampled)
                for _ in sampled[1:]:
                    assert next(versions) == request
                counted.append(request)
                place += len(sampled)
        assert sorted(counted) == list(range(6)), "every response is trained once"
        for turn in rollout.turns:
            reasons[turn.reason] = reasons.get(turn.reason, 0) + 1
    print(model[0].template, reasons)
    assert {"start", "edited", "fork", "new", "" if model[0].continues else "template"} <= reasons.keys()


async def test_thinking_a_call_and_its_result_are_one_sequence(model: tuple[Family, FolderChatText]) -> None:
    """In every spelling of the call, where the family's template keeps an answer that calls a tool as it was said."""
    family, chat = model
    for call in family.calls if family.parser else ():
        episode, engine = an_episode(model, 0)
        end = family.specials[1] if family.template == "glm4moe" else family.specials[0]
        says = [f"{family.thought}{call}{end}", f"{family.thought}3{family.specials[0]}"]
        engine._say = lambda says=says: chat.encode(says.pop(0))  # type: ignore[method-assign]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 2?"}]
        reply = (await episode.chat(messages, TOOLS)).reply
        (made,) = reply.tool_calls
        messages += [reply.message, {"role": "tool", "tool_call_id": made["id"], "content": "3"}]
        await episode.chat(messages, TOOLS)
        rendered = chat.render(messages, TOOLS)
        assert "None" not in rendered.rpartition("1 + 2?")[2], "no content is not the text None"
        assert [turn.reason for turn in episode.turns] == ["start", "" if family.continues else "template"]
        assert (call in chat.decode(engine.given[1])) if family.continues else engine.given[1] == chat.encode(rendered)


def test_a_call_that_does_not_parse_leaves_no_traceback_in_the_log(
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
