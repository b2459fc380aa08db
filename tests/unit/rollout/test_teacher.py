"""Locks: what a teacher is asked, which number each sampled token gets, and that its failures cost responses alone."""

import pytest
from fakes.teacher_server import ALWAYS, BEHAVIOURS, TeacherServer, expected, teacher_server

from slipstream.conf.schema import TeacherConfig
from slipstream.rollout.teacher import Teacher
from slipstream.rollout.types import Prompt, Rollout, Turn


def a_teacher(server: TeacherServer, **options: object) -> Teacher:
    constants = {
        name: options.pop(name) for name in ("try_timeout_s", "max_tries", "max_concurrent") if name in options
    }
    return Teacher(type("Asked", (TeacherConfig,), constants)(base_url=server.url, model="big", **options))


def a_prompt(behaviour: str = "good") -> Prompt:
    return Prompt(0, (BEHAVIOURS.index(behaviour), 40), "")


def a_rollout(*token_ids: int, **more: object) -> Rollout:
    return Rollout(list(token_ids), [-1.0] * len(token_ids), [0] * len(token_ids), "t", "stop", **more)


async def test_ids_are_sent_and_each_sampled_token_gets_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "a secret")
    async with teacher_server() as server:
        teacher = a_teacher(server, api_key_env="TEACHER_KEY")
        found = await teacher.group_logprobs(a_prompt(), [a_rollout(41, 7), a_rollout(), a_rollout(3)])
        assert found == [expected([0, 40, 41, 7])[1:], [], expected([0, 40, 3])[1:]]
        assert server.keys == {"Bearer a secret"}
        assert sorted(body.pop("prompt") for body in server.bodies) == [[0, 40, 3], [0, 40, 41, 7]]
        form = {
            "model": "big", "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 1.0,
            "add_special_tokens": False, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        assert server.bodies == [form, form]
        counts = teacher.take_counts()
        assert (counts["failures"], counts["retries"]) == (0, 0)
        assert counts["response_s"] is not None and counts["response_s"] > 0.0
        assert teacher.take_counts()["response_s"] is None
        await teacher.close()


async def test_a_token_of_an_episode_is_given_what_came_before_it_in_its_branch() -> None:
    """Turn 1 goes on from turn 0; turn 2 is a branch of its own."""
    turns = (Turn(None, [20, 7], 2, "start"), Turn(0, [30], 1, ""), Turn(None, [20, 9], 1, "edited"))
    async with teacher_server() as server:
        teacher = a_teacher(server)
        (found,) = await teacher.group_logprobs(a_prompt(), [a_rollout(50, 51, 52, 53, turns=turns)])
        talk, edited = expected([20, 7, 50, 51, 30, 52]), expected([20, 9, 53])
        assert found == [talk[1], talk[2], talk[4], edited[1]]
        await teacher.close()


async def test_a_teacher_that_is_busy_is_asked_again() -> None:
    async with teacher_server() as server:
        teacher = a_teacher(server)
        assert await teacher.group_logprobs(a_prompt("busy twice"), [a_rollout(3)]) == [expected([1, 40, 3])[1:]]
        counts = teacher.take_counts()
        assert (counts["failures"], counts["retries"]) == (0, 2)
        await teacher.close()


@pytest.mark.parametrize("behaviour", ["silent", *ALWAYS])
async def test_what_is_no_answer_leaves_the_response_out(behaviour: str, caplog: pytest.LogCaptureFixture) -> None:
    async with teacher_server() as server:
        try_timeout_s = 0.3 if behaviour == "silent" else 60.0
        teacher = a_teacher(server, try_timeout_s=try_timeout_s, max_tries=2 if behaviour == "always broken" else 1)
        assert await teacher.group_logprobs(a_prompt(behaviour), [a_rollout(3), a_rollout(4, 5)]) == [None, None]
        assert teacher.take_counts()["failures"] == 2
        if behaviour != "silent":  # with so little time nobody may answer
            assert await teacher.group_logprobs(a_prompt(), [a_rollout(3)]) == [expected([0, 40, 3])[1:]]
        await teacher.close()
    assert caplog.text.count("the teacher failed on a response to prompt 0") == 1, "the second one is only counted"


async def test_no_more_responses_than_allowed_are_asked_about_at_once() -> None:
    async with teacher_server() as server:
        teacher = a_teacher(server, max_concurrent=3)
        await teacher.group_logprobs(a_prompt(), [a_rollout(n) for n in range(12)])
        assert server.num_most == 3
        await teacher.close()


async def test_a_server_that_is_gone_fails_in_time() -> None:
    async with teacher_server() as server:
        teacher = a_teacher(server, timeout_s=0.8)
    assert await teacher.group_logprobs(a_prompt(), [a_rollout(3)]) == [None]
    await teacher.close()
