"""Locks: an episode's rollout is what engines were given and sampled; whatever an agent does costs its own episode.

Everything is real but the engine: the service's process, the agents' processes, HTTP, the character tokenizer.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fakes import odd_agents
from fakes.fleet import never
from fakes.trainer import outcome
from fakes.workers import FakeWorker
from fakes.world import World
from tokenizers import Tokenizer

from slipstream.conf.schema import DataConfig, EpisodesConfig, RewardConfig, RolloutConfig, RunConfig, SamplingConfig
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.agents.episode import Limits
from slipstream.rollout.agents.episode_runner import EpisodeRunner, FinishedEpisode
from slipstream.rollout.branches import branches_of
from slipstream.rollout.errors import AgentError, EngineDied
from slipstream.rollout.types import Prompt, Rollout, Routes
from slipstream.rollout.user_processes.kept_process import MAX_LOG_BYTES

PROMPT = Prompt(3, (1, 5), "begin", {"hints": ["a", "b", "c"]})


class Engine:
    """Samples what `say` returns for the number of the request, and remembers what it was given."""

    def __init__(self, tokenizer: Tokenizer, say: Callable[[int], str] = "abcdefgh".__getitem__) -> None:
        self.tokenizer = tokenizer
        self.say = say
        self.given: list[tuple[int, ...]] = []
        self.sampled: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.error: Exception | None = None

    async def generate(self, prompt: Prompt, sampling: SamplingConfig) -> Rollout:
        if self.error is not None:
            raise self.error
        number = len(self.given)
        self.given.append(prompt.token_ids)
        self.seeds.append(sampling.seed)
        tokens = self.tokenizer.encode(self.say(number % 8), add_special_tokens=False).ids
        self.sampled.append(tokens)
        await asyncio.sleep(0)
        places = np.arange(len(prompt.token_ids) + len(tokens) - 1, dtype=np.int16)[:, None, None]
        routes = Routes(places, places[:, 0, 0] >= 0)
        return Rollout(tokens, [-1.0 - number] * len(tokens), [number] * len(tokens), "", "length", 1, routes=routes)


def config_of(agent: str = "play", **episodes: Any) -> RunConfig:
    rollout = RolloutConfig(
        agent=f"{odd_agents.__file__}:{agent}",
        sampling=SamplingConfig(max_tokens=4),
        max_model_len=256,
        episodes=EpisodesConfig(**episodes),
    )
    return RunConfig(rollout=rollout, reward=RewardConfig())


@asynccontextmanager
async def running(
    config: RunConfig, tmp_path: Path, template: str | None = None
) -> AsyncIterator[tuple[EpisodeRunner, Engine]]:
    folder = tmp_path / "model"
    folder.mkdir()
    save_character_tokenizer(folder, vocab_size=64)
    if template is not None:
        described = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    engine = Engine(Tokenizer.from_file(str(folder / "tokenizer.json")))
    runner = EpisodeRunner(config, folder, log_path=tmp_path / "agents.log")
    try:
        await runner.start()
        runner.sample_with(engine.generate)
        yield runner, engine
    finally:
        await runner.close()


async def test_template_options_of_the_row_go_before_those_of_the_run(tmp_path: Path) -> None:
    options = replace(config_of("behave"), data=DataConfig(chat_template_kwargs={"one": "a", "two": "b"}))
    async with running(options, tmp_path, "{{ messages[0].content }} {{ one }}{{ two }}") as (runner, engine):
        (tmp_path / "model" / "tokenizer_config.json").unlink()  # it was read before the first request
        for own in (None, {"one": "c"}, '{"one": "d"}'):
            fields = {"what": "", "chat_template_kwargs": own}
            (episode,) = await runner.run_group(Prompt(3, (1, 5), "begin", fields), 1)
            assert episode.rollout.failure == ""
    given = [engine.tokenizer.decode(list(tokens)) for tokens in engine.given]
    assert given == ["go ab", "go cb", "go db"]


async def test_an_episode_is_what_the_engine_was_given_and_sampled(tmp_path: Path) -> None:
    async with running(config_of(), tmp_path) as (runner, engine):
        (episode,) = await runner.run_group(PROMPT, 1)
    assert episode.reward == 0.7
    rollout = episode.rollout
    assert rollout.text == "c"
    assert rollout.finish_reason == "length"
    assert rollout.failure == ""
    assert [turn.parent for turn in rollout.turns] == [None, 0, 1]
    assert [turn.reason for turn in rollout.turns] == ["start", "", ""]
    (branch,) = branches_of(PROMPT, rollout)
    assert branch.token_ids == [*engine.given[-1], *engine.sampled[-1]]
    for given, sampled in zip(engine.given, engine.sampled, strict=True):
        assert branch.token_ids[: len(given)] == list(given)
        at = slice(len(given), len(given) + len(sampled))
        assert branch.token_ids[at] == sampled
        assert all(branch.counts[at])
    assert sum(branch.counts) == 3
    assert branch.policy_versions == [0, 1, 2] and rollout.num_evictions == 3
    assert branch.routes is not None
    assert branch.routes.experts[:, 0, 0].tolist() == list(range(len(branch.token_ids) - 1)), "each position's, once"
    text = engine.tokenizer.decode(branch.token_ids, skip_special_tokens=False)
    assert text == "<bos>user: begin\nassistant: a<eos>\nuser: a\nassistant: b<eos>\nuser: b\nassistant: c"


async def test_every_request_has_a_seed_of_its_own_and_a_group_can_be_repeated(tmp_path: Path) -> None:
    seeded = SamplingConfig(max_tokens=4, seed=5, stop_token_ids=(7,))
    asked = config_of(max_turns=9, max_tokens=7)
    asked = replace(asked, rollout=replace(asked.rollout, sampling=seeded))
    async with running(asked, tmp_path) as (runner, engine):
        for _ in range(2):
            await runner.run_group(PROMPT, 2)
        options = runner._options()
        assert options.stop_token_ids == [2, 7], "those of the model, and the run's"
        assert options.limits == Limits(max_turns=9, max_tokens=7, max_turn_tokens=4, max_model_len=256)
        assert not runner._open
    first, again = set(engine.seeds[:6]), set(engine.seeds[6:])
    assert len(first) == 6 and first == again and None not in first


async def play(runner: EpisodeRunner, *behaviours: str, **row: str) -> list[FinishedEpisode]:
    groups = [runner.run_group(Prompt(0, (1,), "p", {"what": what, **row}), 1) for what in behaviours]
    return [episode for group in await asyncio.gather(*groups) for episode in group]


MARK = f"0.{os.getpid()}"


def left_behind() -> list[psutil.Process]:
    """Processes that the agents of this test left, and no other one beside it."""
    return [process for process in psutil.process_iter(["cmdline"]) if MARK in (process.info["cmdline"] or [])]


async def test_what_an_agent_does_costs_its_own_episode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = {
        "raise": "raised", "sys.exit": "raised", "nan": "not_a_number", "text": "not_a_number", "nothing": "",
        "print": "", "turns": "turns", "fork": "", "wait": "", "huge": "tokens", "leave": "", "tensor": "",
        "large": "not_a_number",
    }  # fmt: skip
    async with running(config_of("behave", max_turns=4), tmp_path) as (runner, _):
        await play(runner, "raise")
        assert runner.first_report.endswith("KeyError: 'no such thing'\n") and "odd_agents.py" in runner.first_report
        episodes = dict(zip(expected, await play(runner, *expected, mark=MARK), strict=True))
        again = (await play(runner, "wait", "heat", "heat"))[0]
        assert len(left_behind()) == 1
    assert not left_behind(), "what an agent starts ends with the run"
    logged = [record.getMessage() for record in caplog.records]
    assert sum("an episode failed (raised)" in line for line in logged) == 2, "one of each place"
    told = [line for line in logged if "temperature" in line]
    assert len(told) == 1 and "temperature=0.5 and gets the run's temperature=1" in told[0]
    assert MAX_LOG_BYTES <= (tmp_path / "agents.log").stat().st_size < MAX_LOG_BYTES + 1000, (
        "of 1 GB that a tool prints"
    )
    assert {what: episode.rollout.failure for what, episode in episodes.items()} == expected
    assert episodes["nothing"].reward is None
    assert episodes["tensor"].reward == 1.0
    assert episodes["print"].reward == episodes["wait"].reward == again.reward == 0.5
    assert len(episodes["turns"].rollout.turns) == 4
    assert [turn.reason for turn in episodes["fork"].rollout.turns] == ["start", "fork", "fork", "fork"]
    assert all(episode.rollout.token_ids for episode in episodes.values()), "what was sampled is known all the same"


async def test_an_episode_that_hangs_is_ended_even_if_it_refuses_to_be(tmp_path: Path) -> None:
    async with running(config_of("behave", timeout_s=2), tmp_path) as (runner, _):
        episodes = await play(runner, "hang", "hang for ever")
        assert "waits for ever" in (tmp_path / "agents.log").read_text(), "what it printed tells why it hangs"
        await play(runner, "raise")
    assert runner.first_report == "the episode took longer than rollout.episodes.timeout_s=2 seconds", (
        "and no later one"
    )
    assert [(episode.rollout.failure, episode.reward) for episode in episodes] == [("timeout", None)] * 2


async def test_a_request_that_its_agent_gave_up_is_sampled_no_further(tmp_path: Path) -> None:
    diary, under_way = list[str](), tmp_path / "under way"
    async with running(config_of("behave", max_turns=9), tmp_path) as (runner, engine):

        async def hang_once(prompt: Prompt, sampling: SamplingConfig) -> Rollout:
            diary.append("asked")
            if len(diary) == 2:
                try:
                    under_way.touch()
                    await asyncio.Event().wait()
                finally:
                    diary.append("given up")
                    under_way.unlink()
            return await engine.generate(prompt, sampling)

        runner.sample_with(hang_once)
        (episode,) = await play(runner, "impatient", under_way=str(under_way))
    assert (diary, episode.reward) == (["asked", "asked", "given up", "asked"], 0.5)


async def test_a_group_that_is_given_up_ends_at_its_agents_and_is_sampled_no_further(tmp_path: Path) -> None:
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def hang(prompt: Prompt, sampling: SamplingConfig) -> Rollout:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        raise AssertionError("it hangs")

    async with running(config_of("behave"), tmp_path) as (runner, _):
        runner.sample_with(hang)
        group = asyncio.create_task(play(runner, ""))
        await asked.wait()
        group.cancel()
        await asyncio.wait_for(given_up.wait(), 60)


async def test_an_agent_process_that_is_lost_is_replaced_and_a_lost_service_ends_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EpisodesConfig, "blocked_s", 8.0)
    lost, fine = {}, []
    async with running(config_of("behave"), tmp_path) as (runner, _):
        for what in ("exit", "block", "garbage"):
            (lost[what],) = await play(runner, what)
            fine += await play(runner, "wait")
        group = asyncio.create_task(play(runner, "hang"))
        service = next(
            child for child in psutil.Process().children(recursive=True)
            if "slipstream.rollout.agents.service" in child.cmdline() and "-I" not in child.cmdline()[:2]
        )  # fmt: skip
        service.kill()
        with pytest.raises(EngineDied, match=r"agents\.log"):
            await group
        with pytest.raises(EngineDied, match=r"agents\.log"):
            await play(runner, "wait")
    assert {what: (episode.rollout.failure, episode.reward) for what, episode in lost.items()} == {
        "exit": ("died", None), "block": ("blocked", None), "garbage": ("died", None)
    }  # fmt: skip
    assert [(episode.rollout.failure, episode.reward) for episode in fine] == [("", 0.5)] * 3


async def test_a_service_that_is_not_understood_leaves_nobody_waiting(tmp_path: Path) -> None:
    class Odd:
        async def receive(self) -> list[str]:
            return ["nonsense"]

    channel: Any = Odd()
    runner = EpisodeRunner(config_of("behave"), tmp_path, log_path=None)
    group = asyncio.create_task(runner.run_group(PROMPT, 2))
    await asyncio.sleep(0)
    await runner._listen(channel)
    with pytest.raises(EngineDied, match="nonsense"):
        await group


async def test_an_engine_that_dies_costs_the_turn_that_it_sampled_and_the_last_one_the_group(tmp_path: Path) -> None:
    world = World(committed=[0, 0])
    workers = [FakeWorker(world, 0), FakeWorker(world, 1)]
    workers[0].fails_after = 2
    supervisor = Supervisor(workers, restart=never)
    await supervisor.hold()
    await supervisor.settle([outcome(True), outcome(True)])
    router = Router(supervisor, request_timeout_s=60)
    async with running(config_of(), tmp_path) as (runner, engine):
        runner.sample_with(router.generate)
        episodes = await runner.run_group(PROMPT, 3)
        engine.error = EngineDied("all of them")
        runner.sample_with(engine.generate)
        with pytest.raises(EngineDied, match="all of them"):
            await runner.run_group(PROMPT, 2)
    assert router.num_failed_groups >= 1
    assert [episode.rollout.failure for episode in episodes] == [""] * 3
    assert [len(episode.rollout.turns) for episode in episodes] == [3] * 3


async def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AgentError, match=f"rollout.episodes.address={address}"):
            async with running(config_of(address=address), tmp_path):
                pass
