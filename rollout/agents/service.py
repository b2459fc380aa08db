"""`python -m slipstream.rollout.agents.service FD`: a run's endpoint of agents, their conversations and processes.

    controller --episode, task--> service --task, base URL, key--> agent process (agent_pool.py)
        ^                          |  ^                                  |
        |<--parent, new tokens-----+  +------OpenAI's protocol-----------+   (endpoint.py)
        +---sampled tokens--------->
        |<--reward, turns----------+

Rendering, tokenizing, parsing and HTTP happen here, and not in the controller's event loop. Generation goes through the
controller, the one place that knows which engines serve. Owns: episodes from their start to their end, their deadline
and their keys. Does not own: a turn (episode.py), the tokens that were sampled (episode_runner.py, in the controller).
It ends when the controller closes the connection, and so do the agents' processes.

    controller -> options, then ["episode", number, task, template options], ["cancel", number], ["sampled",
                  request, token ids, log-probabilities, finish reason], ["failed", request, reason]
    service    -> ["ready", base URL, source file] or ["refused", reason], then ["generate", request, episode, parent
                  request, token ids, most tokens], ["drop", request], ["told", text for run.log],
                  ["ended", episode, {...}]
"""

import asyncio
import itertools
import logging
import os
import secrets
import socket
import sys
import time
from dataclasses import asdict
from functools import partial

from slipstream.conf.deadlines import within
from slipstream.conf.json_files import JsonObject
from slipstream.rollout.agents.agent_pool import agent_pool, run_episode
from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.agents.endpoint import Endpoint
from slipstream.rollout.agents.episode import EngineFailed, Episode, Sampled, ServiceOptions
from slipstream.rollout.agents.failures import ENGINE
from slipstream.rollout.channel import Channel, Disconnected
from slipstream.rollout.errors import AgentError
from slipstream.rollout.user_processes.outcomes import NOTHING, RAISED, SCORE, TIMEOUT, Outcome
from slipstream.weight_sync.typed_msgpack import unpack


class Service:
    def __init__(self, channel: Channel, options: ServiceOptions) -> None:
        self._channel = channel
        self._options = options
        episodes, sampling = options.episodes, options.sampling
        self._chat = FolderChatText(options.folder, options.stop_token_ids, episodes.tool_parser)
        self._episodes: dict[str, Episode] = {}
        fixed = {"temperature": sampling.temperature, "top_p": 1.0}
        self._endpoint = Endpoint(self._episodes, fixed, lambda text: channel.send(["told", text]), sampling.stop)
        self._pool = agent_pool(
            options.agent, episodes.num_processes, options.blocked_s, options.environment, options.log_path
        )
        self._base_url = ""
        self._running: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, asyncio.Future[Sampled]] = {}
        self._request_numbers = itertools.count()

    async def start(self) -> tuple[str, str]:
        """Listen, and start the agents' processes. Returns base URL and the file that defines the agent. Raises:
        AgentError."""
        address = self._options.episodes.host_and_port
        try:
            self._base_url = await self._endpoint.start(*address)
        except OSError as e:
            raise AgentError(
                f"rollout.episodes.address={':'.join(map(str, address))}: {e.strerror or e}; give an address "
                "of this machine and a free port, or port 0 for any"
            ) from e
        # A template's first use imports transformers: seconds, in which no request would be answered.
        (source,), _ = await asyncio.gather(self._pool.start(), asyncio.to_thread(self._chat.load))
        return self._base_url, source

    async def serve(self) -> None:
        """Do what the controller says until it closes the connection. Raises: Disconnected."""
        while True:
            message = await self._channel.receive()
            match message:
                case ["episode", number, task, template_options]:
                    running = self._running[number] = asyncio.create_task(self._run(number, task, template_options))
                    running.add_done_callback(lambda _, number=number: self._running.pop(number, None))
                case ["cancel", number]:
                    if number in self._running:
                        self._running[number].cancel()
                case ["sampled", request, token_ids, logprobs, finish_reason]:
                    if (answered := self._waiting_for(request)) is not None:
                        answered.set_result(Sampled(request, token_ids, logprobs, finish_reason))
                case ["failed", request, reason]:
                    if (answered := self._waiting_for(request)) is not None:
                        answered.set_exception(EngineFailed(reason))
                case _:
                    raise AssertionError(f"the controller said {message!r:.100}")

    async def close(self) -> None:
        await self._pool.close()
        await self._endpoint.close()

    def _waiting_for(self, request: int) -> asyncio.Future[Sampled] | None:
        answered = self._requests.get(request)
        return None if answered is None or answered.done() else answered

    async def _run(self, number: int, task: JsonObject, template_options: JsonObject) -> None:
        """One episode, from its key to the message that tells its end."""
        key = secrets.token_urlsafe(24)
        generate = partial(self._generate, number)
        episode = Episode(self._chat, self._options.limits, generate, template_options)
        self._episodes[key] = episode
        limit_s = self._options.episodes.timeout_s
        try:
            async with within(limit_s):
                outcome = await run_episode(self._pool, task, self._base_url, key)
        except TimeoutError:
            report = f"the episode took longer than rollout.episodes.timeout_s={limit_s:g} seconds"
            outcome = Outcome(TIMEOUT, report=report, place="timeout")
        finally:
            del self._episodes[key]
            episode.end()
        failure = "" if outcome.kind in (SCORE, NOTHING) else outcome.kind
        if failure == RAISED:  # the agent passed on what the endpoint had told it
            failure = ENGINE if episode.engine_failed else episode.reached or RAISED
        said: JsonObject = {
            "failure": failure,
            "reward": outcome.value,
            "report": outcome.report,
            "place": outcome.place,
            "text": episode.last_reply,
            "finish_reason": episode.last_finish_reason,
            "seconds": time.monotonic() - episode.started,
            "turns": [asdict(turn) for turn in episode.turns],
        }
        self._channel.send(["ended", number, said])

    async def _generate(self, episode: int, parent: int | None, token_ids: list[int], max_tokens: int) -> Sampled:
        """Let the controller sample. Cancelled, it tells the controller that nobody waits."""
        request = next(self._request_numbers)
        answered: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._requests[request] = answered
        self._channel.send(["generate", request, episode, parent, token_ids, max_tokens])
        try:
            return await answered
        except asyncio.CancelledError:
            self._channel.send(["drop", request])
            raise
        finally:
            del self._requests[request]


async def _serve(connection: socket.socket) -> None:
    channel = await Channel.over(connection)
    options = unpack(ServiceOptions, await channel.receive())
    service: Service | None = None
    try:
        service = Service(channel, options)
        channel.send(["ready", *await service.start()])
        await service.serve()
    except AgentError as e:
        channel.send(["refused", str(e)])
        await channel.receive()  # it closes the connection when it has read that
    finally:
        if service is not None:
            await service.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s [agents] %(name)s: %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    try:
        asyncio.run(_serve(connection))
    except Disconnected:
        pass
    finally:
        logging.shutdown()
        os._exit(0)  # the keeper beside this process ends what agents left


if __name__ == "__main__":
    main()
