"""Asks the teacher of distillation, before anything starts, whether it is there and counts the policy's tokens.

    GET /models --> the model, its longest sequence      POST /completions with a text --> the ids of its tokens

Owns: what is asked once. Does not own: the form of request and answer (rollout.teacher).
"""

import json
import os

import httpx

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import RunConfig, TeacherConfig
from slipstream.orchestrator.inputs.rows.conversations import end_of_text
from slipstream.orchestrator.inputs.rows.prompt_rows import RowEncoder
from slipstream.rollout.openai_client import key_headers
from slipstream.rollout.teacher import WrongAnswer, read_answer, request_of

PROBE = "def f(r): r*3.14 # Größe 面積"
"""A text in which tokenizers differ, short enough for any model; the end of sequence is added to it."""


def check_teacher(config: RunConfig) -> str:
    """What was found, for people. Raises: ConfigError."""
    teacher = config.algorithm.teacher
    key = teacher.api_key_env
    if key is not None and key not in os.environ:
        raise ConfigError(
            f"algorithm.teacher.api_key_env names {key}, which is not set; export it, or set it to null for a teacher "
            "that takes no key"
        )
    with httpx.Client(headers=key_headers(key), timeout=teacher.try_timeout_s, trust_env=False) as client:
        _check_model(config, _asked(client, teacher, "GET", "/models").content)
        encoder = RowEncoder(config)
        text = PROBE + end_of_text(encoder)
        answer = _asked(client, teacher, "POST", "/completions", request_of(teacher.model, text))
    try:
        theirs, _ = read_answer(answer.content)
    except WrongAnswer as error:
        raise ConfigError(f"algorithm.teacher.base_url={teacher.base_url} cannot teach: {error}") from error
    ours = encoder.encode(text, add_special_tokens=False)
    if theirs != ours:
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
        raise ConfigError(
            f"algorithm.teacher.model={teacher.model} has other tokens than the policy: of one text it makes "
            f"{len(theirs)}, the policy {len(ours)}, and they differ from token {first} on; give a teacher with the "
            "policy's tokenizer"
        )
    return f"{teacher.model} at {teacher.base_url}"


def _asked(
    client: httpx.Client, teacher: TeacherConfig, method: str, path: str, body: JsonObject | None = None
) -> httpx.Response:
    url = teacher.base_url.rstrip("/") + path
    try:
        answer = client.request(method, url, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"algorithm.teacher.base_url={teacher.base_url}: {url} does not answer ({type(error).__name__}: {error}); "
            "start the teacher first, for example with vllm serve MODEL, or repair the address"
        ) from error
    if not answer.is_success:
        raise ConfigError(
            f"algorithm.teacher.base_url={teacher.base_url}: {url} answers status {answer.status_code}: "
            f"{answer.text[:300]!r}; give the address of an OpenAI endpoint, up to /v1, and its key "
            "(algorithm.teacher.api_key_env) where it takes one"
        )
    return answer


def _check_model(config: RunConfig, answer: bytes) -> None:
    teacher = config.algorithm.teacher
    try:
        models = {str(one["id"]): one for one in json.loads(answer)["data"]}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"algorithm.teacher.base_url={teacher.base_url} is no OpenAI endpoint: its /models is {answer[:300]!r}"
        ) from None
    if teacher.model not in models:
        raise ConfigError(
            f"algorithm.teacher.model={teacher.model}: there is none of that name at {teacher.base_url}; it has "
            f"{', '.join(models) or 'none'}"
        )
    rollout = config.rollout
    fed = rollout.max_model_len
    if rollout.agent is None:
        fed = min(fed, config.max_prompt_tokens + rollout.sampling.max_tokens)
    longest, needed = models[teacher.model].get("max_model_len"), fed + 1  # vLLM counts a token that it does not return
    if isinstance(longest, int) and longest < needed:
        raise ConfigError(
            f"algorithm.teacher.model={teacher.model} takes {longest} tokens at most, and the run's longest sequences "
            f"need {needed}; serve it with --max-model-len {needed}, or lower data.max_prompt_tokens or "
            "rollout.sampling.max_tokens"
        )
