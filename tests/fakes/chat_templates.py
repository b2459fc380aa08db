"""Chat templates of models that people train, and a tokenizer of single characters and special tokens around them.

The templates are the public ones, cut to what renders text messages and tool calls:

    qwen3     https://huggingface.co/Qwen/Qwen3-8B/blob/main/tokenizer_config.json: thinking before the last user
              message is removed, thinking after it is kept
    llama3    https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct: content is trimmed
    chatml    https://huggingface.co/Qwen/Qwen2.5-7B-Instruct: the plain form, with tool calls
    glm4      https://huggingface.co/zai-org/GLM-4.5: no text ends a turn but the next one's beginning
    deepseek  https://huggingface.co/deepseek-ai/DeepSeek-R1: whatever precedes </think> is always removed
    gpt_oss   https://huggingface.co/openai/gpt-oss-20b: an answer is sampled with <|return|> and rendered with <|end|>
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

_CALLS = (
    "{%- for call in message.tool_calls or [] %}{%- set f = call.function %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' + (f.arguments | tojson)'
    " + '}\\n</tool_call>' }}{%- endfor %}"
)
_TOOLS = "{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"

TEMPLATES: dict[str, tuple[str, str]] = {
    "qwen3": (
        _TOOLS + "{%- set ns = namespace(last=-1) %}"
        "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
        "{%- endfor %}"
        "{%- for message in messages %}{%- set content = message.content or '' %}"
        "{%- if message.role == 'assistant' %}{%- set thought = '' %}"
        "{%- if '</think>' in content %}"
        "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{%- if loop.index0 > ns.last and thought %}"
        "{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}"
        "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}" + _CALLS + "{{- '<|im_end|>\\n' }}"
        "{%- elif message.role == 'tool' %}"
        "{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        "<|im_end|>",
    ),
    "llama3": (
        "{{- '<|begin_of_text|>' }}{%- if tools %}{{- (tools | tojson) }}{%- endif %}"
        "{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content or '') | trim }}"
        + _CALLS
        + "{{- '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        "<|eot_id|>",
    ),
    "chatml": (
        _TOOLS
        + "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
        + _CALLS
        + "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        "<|im_end|>",
    ),
    "glm4": (
        "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' + (tools | tojson) }}{%- endif %}"
        "{%- for message in messages %}"
        "{{- '<|' + ('observation' if message.role == 'tool' else message.role) + '|>\\n' + (message.content or '') }}"
        + _CALLS
        + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}",
        "",
    ),
    "deepseek": (
        "{{- '<|begin_of_sentence|>' }}{%- if tools %}{{- (tools | tojson) }}{%- endif %}"
        "{%- for message in messages %}{%- set content = message.content or '' %}"
        "{%- if message.role == 'assistant' %}{%- if '</think>' in content %}"
        "{%- set content = content.split('</think>')[-1] %}{%- endif %}"
        "{{- '<|Assistant|>' + content }}" + _CALLS + "{{- '<|end_of_sentence|>' }}"
        "{%- else %}{{- '<|User|>' + content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}",
        "<|end_of_sentence|>",
    ),
    "gpt_oss": (
        "{{- '<|start|>system<|message|>' }}{%- if tools %}{{- (tools | tojson) }}{%- endif %}{{- '<|end|>' }}"
        "{%- for message in messages %}"
        "{{- '<|start|>' + message.role + '<|message|>' + (message.content or '') }}"
        + _CALLS
        + "{{- '<|end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant<|message|>' }}{%- endif %}",
        "<|end|>",
    ),
}
"""Name -> (template, text that ends an answer)."""

SAMPLED_END = "<|return|>"
"""What gpt-oss samples at the end of a last answer. Its template writes <|end|> there once the conversation goes on."""

_SPECIAL = re.compile(r"<\|[a-zA-Z_]+\|>")
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class FakeChatText:
    """What token trees call of a FolderChatText: a template of the table, characters and special tokens as tokens."""

    def __init__(self, name: str) -> None:
        template, self.end = TEMPLATES[name]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = json.dumps
        self._template = environment.from_string(template)
        self._specials: dict[str, int] = {}
        ends = [self.end, *([SAMPLED_END] if name == "gpt_oss" else [])]
        self.stop_texts = {self._id(end): end for end in ends if end}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
    ) -> str:
        parsed = [_with_objects(message) for message in messages]
        return self._template.render(
            messages=parsed, tools=list(tools) or None, add_generation_prompt=True, **(options or {})
        )

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        place = 0
        for special in _SPECIAL.finditer(text):
            token_ids += [ord(character) for character in text[place : special.start()]]
            token_ids.append(self._id(special.group()))
            place = special.end()
        return [*token_ids, *(ord(character) for character in text[place:])]

    encode_prompt = encode

    def check_tokens(self, token_ids: Sequence[int]) -> None: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        names = {number: text for text, number in self._specials.items()}
        return "".join(names[token] if token in names else chr(token) for token in token_ids)

    def meaning(self, text: str, tools: Sequence[Mapping[str, Any]]) -> object:
        calls = [_value(call) for call in _CALL.findall(text)] if tools else []
        plain = _CALL.sub("", text) if tools else text
        return "".join(_SPECIAL.sub("", plain).split()), calls

    def reply(self, sampled: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The message that a client gets of sampled tokens."""
        text = self.decode(sampled)
        for end in self.stop_texts.values():
            text = text.removesuffix(end)
        values = [value for call in _CALL.findall(text) if tools and (value := _value(call))]
        if not values:
            return {"role": "assistant", "content": text}
        functions = [{"name": value["name"], "arguments": json.dumps(value["arguments"])} for value in values]
        calls = [{"id": f"call-{number}", "type": "function", "function": one} for number, one in enumerate(functions)]
        return {"role": "assistant", "content": text[: text.index("<tool_call>")], "tool_calls": calls}

    def _id(self, special: str) -> int:
        return self._specials.setdefault(special, 1 << 21 | len(self._specials))


def _value(call: str) -> Any:
    try:
        value = json.loads(call)
    except ValueError:
        return None
    return value if isinstance(value, dict) and {"name", "arguments"} <= value.keys() else None


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls}
