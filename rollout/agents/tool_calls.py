"""Tool calls in a response, found by vLLM's own parsers. The only file of this room that knows vLLM.

Owns: the list of parsers, read without importing vLLM, and the call of one of them. Does not own: what follows from a
call. vLLM 0.25.1 and 0.32 have what is used here.
"""

import ast
import importlib.util
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.conf.failures import in_words, outcome_of, raised_as
from slipstream.conf.json_files import JsonMapping, JsonObject
from slipstream.rollout.errors import AgentError

logger = logging.getLogger(__name__)

NOT_CALLED_ALONE = frozenset({"openai"})
"""Parsers that vLLM's table has for others, which read tokens instead of text (gpt-oss)."""


def parser_names() -> list[str]:
    """Names of vLLM's tool parsers; empty without vLLM. Its table is read as text: the import takes seconds."""
    spec = importlib.util.find_spec("vllm")
    places = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    for place in places:
        source = Path(place) / "tool_parsers" / "__init__.py"
        if not source.is_file():
            continue
        for statement in ast.parse(source.read_text()).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "_TOOL_PARSERS_TO_REGISTER":
                return sorted(set(ast.literal_eval(statement.value)) - NOT_CALLED_ALONE)
    return []


class ToolCallParser:
    """One of vLLM's parsers, for the model's tokenizer in transformers' class. Raises AgentError: the parser needs
    tokens that the tokenizer lacks, or reads no text."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        from vllm.tool_parsers import ToolParserManager

        # A policy that learns writes many calls that do not parse, and vLLM would print a traceback of each.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._class = ToolParserManager.get_tool_parser(name)
        self._tokenizer = tokenizer
        cure = f"; give the parser of the model's family, one of {', '.join(parser_names())}"
        with raised_as(AgentError, f"rollout.episodes.tool_parser={name} is not for this model: ", cure):
            request = self._request([{"type": "function", "function": {"name": "f", "parameters": {}}}])
            self._made(request).extract_tool_calls("", request=request)  # it looks for its own tokens

    def skips_special_tokens(self, tools: Sequence[JsonMapping]) -> bool:
        """Whether the parser wants the text without special tokens."""
        request = self._request(tools)
        return self._made(request).adjust_request(request).skip_special_tokens

    def parse(self, text: str, tools: Sequence[JsonMapping]) -> tuple[str, list[JsonObject]]:
        """(text beside the calls, the calls as OpenAI's protocol has them); no calls if the parser fails."""
        request = self._request(tools)
        found = outcome_of(lambda: self._made(request).extract_tool_calls(text, request=request))
        if isinstance(found, Exception):
            logger.warning("the tool parser failed on a response, which counts as text: %s", in_words(found))
            return text, []
        if not found.tools_called:
            return found.content if found.content is not None else text, []
        calls = [
            {
                "id": f"call-{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in found.tool_calls
        ]
        return found.content or "", calls

    def _request(self, tools: Sequence[JsonMapping]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return ChatCompletionRequest.model_validate({"messages": [], "model": "policy", "tools": list(tools)})

    def _made(self, request: Any) -> Any:
        return self._class(self._tokenizer, request.tools)
