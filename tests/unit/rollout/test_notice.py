"""Locks: a worker is told to go by a file that appears, or by a URL that answers 200; nothing else is a notice."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slipstream.rollout.notice import tell_of_notice
from slipstream.rollout.worker_process import log_to_stderr
from slipstream.rollout.worker_verbs import NOTICE


class Metadata(ThreadingHTTPServer):
    """A machine's metadata service."""

    code = 404
    num_asked = 0

    async def looked_at(self) -> None:
        """Until whoever watches has acted on an answer of now."""
        enough = self.num_asked + 3
        while self.num_asked < enough:
            await asyncio.sleep(0.01)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Metadata) and self.path == "/latest/meta-data/spot/instance-action"
        self.server.num_asked += 1
        self.send_response(self.server.code)
        self.end_headers()
        self.wfile.write(b'{"action": "terminate"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    with Metadata(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def test_a_url_that_answers_200_is_a_notice_and_every_other_answer_is_none(
    metadata: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.NOTSET, "httpx")
    log_to_stderr("rollout-0")  # as in a worker's process
    told: list[str] = []
    url = f"http://127.0.0.1:{metadata.server_port}/latest/meta-data/spot/instance-action"
    watching = asyncio.create_task(tell_of_notice(url, told.append, every_s=0.01))
    await metadata.looked_at()
    assert (told, caplog.text) == ([], ""), "404: no notice"
    metadata.code = 401
    await metadata.looked_at()
    assert told == [] and caplog.text.count("it answers 401") == 1
    metadata.code = 200
    await watching
    assert told == [NOTICE]


async def test_a_file_that_appears_is_a_notice(tmp_path: Path) -> None:
    told: list[str] = []
    file = tmp_path / "taken"
    watching = asyncio.create_task(tell_of_notice(str(file), told.append, every_s=0.01))
    await asyncio.sleep(0.05)
    assert told == []
    file.touch()
    await watching
    assert told == [NOTICE]


async def test_a_service_that_does_not_answer_is_said_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    watching = asyncio.create_task(tell_of_notice("http://127.0.0.1:9/", lambda who: None, every_s=0.01))
    while not caplog.text:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not watching.done() and caplog.text.count("no word that there is none") == 1
    watching.cancel()
