"""Which fields of a request the endpoint honours. The table is closed: any other field is refused by its name.

    honoured   the endpoint does what it says
    harmless   no token depends on it
    fixed      the run's options decide, and the log says so
    others     refused, unless the value asks for nothing: null, or what OpenAI's and vLLM's servers take it for when it
               is absent (every client library sends some of those)

Most of what is refused would change the distribution that tokens are drawn from, so that the trainer's
log-probabilities would be of another one.
"""

from collections.abc import Collection, Mapping

from slipstream.conf.json_files import JsonMapping

HONOURED = frozenset(
    {
        *("model", "max_tokens", "max_completion_tokens", "n", "logprobs", "stream", "stream_options"),
        *("return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens"),
    }
)
HONOURED_OF_CHAT = frozenset({"messages", "tools", "tool_choice", "chat_template_kwargs"})
HONOURED_OF_TEXT = frozenset({"prompt"})
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "session_id"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt", "priority"),
        *("stream_interval", "mm_payload", "return_mm_kwargs"),
    }
)
"""Names, accounts, caches, queues; how many tokens a part of a stream has (it comes as one); what vLLM ignores, too."""
FIXED = ("temperature", "top_p")
"""They are those with which the trainer computes log-probabilities: rollout.sampling.temperature, and no bound."""

_NO_CONSTRAINTS = "it constrains decoding; ask for the form in a message, or offer a tool whose arguments have it"
_OF_THE_TEMPLATE = "give it in chat_template_kwargs, as a variable of the model's chat template"
_OF_THE_RUN = "rollout.sampling.{0} is for all requests"
_OTHER_DISTRIBUTION = "the trainer's log-probabilities are of the model's own distribution"
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stop": ([], ""),
    "seed": (),
    "top_k": (-1, 0),
    "response_format": ({}, {"type": "text"}),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs"), (0,)),
    "routed_experts_prompt_start": (0,),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "functions", "documents"), ([],)),
    **dict.fromkeys(("logit_bias", "structured_outputs", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("use_beam_search", "watermarking", "echo", "ignore_eos", "continue_final_message"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_offsets", "return_prompt_text"), (False,)),
    **dict.fromkeys(("parallel_tool_calls", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (True,)),
}
"""Fields that are not honoured -> values that ask for nothing, beside null."""
_NEUTRAL_OF_CHAT: dict[str, tuple[object, ...]] = {"add_special_tokens": (False,)}
_NEUTRAL_OF_TEXT: dict[str, tuple[object, ...]] = {"add_special_tokens": (True,)}
_WHY: dict[str, str] = {
    "stop": _OF_THE_RUN.format("stop") + ", and a request may have the same texts",
    "stop_token_ids": _OF_THE_RUN.format("stop_token_ids"),
    "ignore_eos": _OF_THE_RUN.format("stop_at_eos"),
    "seed": _OF_THE_RUN.format("seed") + ", and gives each request numbers of its own",
    **dict.fromkeys(("top_k", "min_p", "logit_bias", "min_tokens", "bad_words"), _OTHER_DISTRIBUTION),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), _OTHER_DISTRIBUTION),
    "allowed_token_ids": _OTHER_DISTRIBUTION,
    **dict.fromkeys(("response_format", "structured_outputs", "vllm_xargs"), _NO_CONSTRAINTS),
    **dict.fromkeys(("enable_thinking", "reasoning_effort", "thinking"), _OF_THE_TEMPLATE),
    "functions": "the protocol's older form of tools",
    "function_call": "the protocol's older form of tool_choice",
    "top_logprobs": "log-probabilities are those of the sampled tokens (logprobs)",
    "prompt_logprobs": "log-probabilities are those of the sampled tokens (logprobs)",
    "continue_final_message": "give the text so far to session.complete, or to /v1/completions",
    "add_generation_prompt": "give the text to session.complete, or to /v1/completions",
    "best_of": "ask for n, and choose",
    "parallel_tool_calls": "an answer may have several calls; take the first",
}
_STREAM_OPTIONS: dict[str, tuple[object, ...] | None] = {
    "include_usage": None,  # any
    "include_obfuscation": None,
    "continuous_usage_stats": (False,),
}


class FieldRefused(Exception):
    """The request asks for what is not done. The message names the field."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def check_fields(body: JsonMapping, *, is_chat: bool, stop: Collection[str] = ()) -> None:
    """Refuse a request with a field that the endpoint would ignore; `stop` are the texts at which the run ends every
    response. Raises FieldRefused, of the first such field."""
    known = HONOURED | HARMLESS | {*FIXED} | (HONOURED_OF_CHAT if is_chat else HONOURED_OF_TEXT)
    neutral = _NEUTRAL | (_NEUTRAL_OF_CHAT if is_chat else _NEUTRAL_OF_TEXT)
    for name, value in body.items():
        if name in known or value is None or value in neutral.get(name, ()):
            continue
        texts = [value] if isinstance(value, str) else value
        if name == "stop" and isinstance(texts, list) and {*map(str, texts)} == {*stop}:
            continue
        if name.startswith("guided_"):
            why = _NO_CONSTRAINTS
        else:
            why = _WHY.get(name, "it would be ignored")
        raise FieldRefused(
            name, f"{name}={_short(value)} is not supported by the endpoint of a training run: {why}; leave it out"
        )
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise FieldRefused("stream_options", f"stream_options must be an object, got {_short(options)}")
    for name, value in options.items():
        allowed = _STREAM_OPTIONS.get(name, ())
        if allowed is not None and value is not None and value not in allowed:
            raise FieldRefused(
                "stream_options", f"stream_options: {name}={_short(value)} is not supported; leave it out"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
