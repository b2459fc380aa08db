"""Locks: before anything starts, one message says why a teacher cannot teach this policy."""

import asyncio

import pytest
from fakes.teacher_server import TeacherServer, teacher_server

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.inputs.given_code import check_teacher_answers
from slipstream.orchestrator.inputs.rows.prompt_rows import RowEncoder


def a_config(url: str, *more: str) -> RunConfig:
    words = ["experiment=quickstart", "algorithm=distill", f"algorithm.teacher.base_url={url}"]
    return load_run_config([*words, "algorithm.teacher.model=big", *more])


def own_tokens(text: str) -> list[int]:
    return RowEncoder(a_config("http://x/v1")).encode(text, add_special_tokens=False)


async def said(server: TeacherServer, *more: str) -> str:
    """What is found, or refused."""
    try:
        fact = await asyncio.to_thread(check_teacher_answers, a_config(server.url, *more))
    except ConfigError as error:
        return str(error)
    return fact.finding


async def test_a_teacher_with_the_policys_tokens_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "a secret")
    async with teacher_server(own_tokens) as server:
        assert await said(server, "algorithm.teacher.api_key_env=TEACHER_KEY") == f"big at {server.url}"
        assert server.keys == {"Bearer a secret"}
        server.max_model_len = 16 + 4 + 1  # prompt, response, and the token that vLLM counts
        assert await said(server) == f"big at {server.url}"
        server.max_model_len = None  # another server does not say
        assert await said(server, "algorithm.teacher.model=bigger") == f"bigger at {server.url}"


async def test_a_teacher_that_cannot_teach_is_refused() -> None:
    async with teacher_server(own_tokens) as server:
        assert "model=huge: there is none of that name at" in await said(server, "algorithm.teacher.model=huge")
        server.max_model_len = 20
        assert "takes 20 tokens at most, and the run's longest sequences need 21; serve it" in await said(server)
        server.max_model_len = 4096
        server.tokenize = lambda text: [*own_tokens(text)[:-2], 9, 9]
        assert "has other tokens than the policy" in await said(server)
        server.tokenize = lambda text: own_tokens(text)[:-1]
        assert "has other tokens than the policy" in await said(server)
        server.models = ["no such list"]
        assert "is no OpenAI endpoint: its /models is" in await said(server)
        missing = await said(server, "algorithm.teacher.api_key_env=NO_SUCH_KEY")
        assert "algorithm.teacher.api_key_env names NO_SUCH_KEY, which is not set" in missing
        elsewhere = a_config(server.url.removesuffix("/v1"))
        with pytest.raises(ConfigError, match=r"answers status 404.*up to /v1"):
            await asyncio.to_thread(check_teacher_answers, elsewhere)
    assert "does not answer (ConnectError" in await said(server)


def test_nothing_is_asked_where_nothing_is_distilled() -> None:
    assert check_teacher_answers(load_run_config(["experiment=quickstart"])) is None
    assert check_teacher_answers(a_config("http://127.0.0.1:1/v1", "run.num_steps=0")).finding.startswith("not asked")
