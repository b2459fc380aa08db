"""A served engine is asked in the one order that is safe, and its refusals reach the user with their reason."""

import base64
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import slipstream.rollout.served.client
from slipstream.rollout.errors import EngineError
from slipstream.rollout.served.client import RankReport, Rendezvous, ServedEngine, send_report
from slipstream.weight_sync.layout import TensorMeta

KEY = b"k" * 32
TENSORS = [TensorMeta("w", (2, 3), "bfloat16")]


class Api(ThreadingHTTPServer):
    """vLLM's routes; what init_weight_transfer_engine makes of its ranks is the test's to say."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.reports: list[RankReport] = []
        self.report_key = KEY
        self.report_s = 60.0
        self.status: dict[str, int] = {}
        self.headers: dict[str, str] = {}
        self.authorization: str | None = None
        self.answers: dict[str, bytes] = {"/is_paused": b'{"is_paused": false}'}
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        self.server.calls.append((self.path, body))
        self.server.authorization = self.headers.get("Authorization")
        if self.path == "/init_weight_transfer_engine":
            for report in self.server.reports:
                send_report(
                    body["init_info"]["report_to"], self.server.report_key, report, timeout_s=self.server.report_s
                )
        self.send_response(self.server.status.get(self.path, 200))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.answers.get(self.path, b"{}"))

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as api:
        yield api
        api.shutdown()


elsewhere = api  # another server, which must not be asked


def attach(api: Api, timeout_s: float = 60.0) -> list[str]:
    rendezvous = Rendezvous(KEY, "127.0.0.1")
    try:
        return ServedEngine(api.url).attach(TENSORS, KEY, rendezvous, transport="tcp", timeout_s=timeout_s)
    finally:
        rendezvous.close()


def test_endpoints_come_by_rank_in_whatever_order_ranks_report(api: Api) -> None:
    api.reports = [RankReport(1, 2, "tcp://b"), RankReport(0, 2, "tcp://a")]
    assert attach(api) == ["tcp://a", "tcp://b"]
    ((path, body),) = api.calls
    assert path == "/init_weight_transfer_engine"
    assert body["init_info"]["tensors"] == [["w", [2, 3], "bfloat16"]]
    assert bytes.fromhex(body["init_info"]["key"]) == KEY


def test_a_rank_that_refuses_says_why(api: Api) -> None:
    api.reports = [RankReport(0, 2, "tcp://a"), RankReport(1, 2, error="UnsupportedWeights", text="x is empty")]
    api.status["/init_weight_transfer_engine"] = 500
    with pytest.raises(EngineError, match="rank 1: UnsupportedWeights: x is empty"):
        attach(api)


def test_a_missing_rank_and_a_report_without_the_key_are_not_taken_for_endpoints(api: Api) -> None:
    api.reports = [RankReport(0, 2, "tcp://a")]
    with pytest.raises(EngineError, match="1 ranks reported within"):
        attach(api, 0.3)
    api.reports, api.report_key, api.report_s = [RankReport(0, 1, "tcp://evil")], b"x" * 32, 1.0
    with pytest.raises(EngineError, match="0 ranks reported within"):
        attach(api, 0.3)


def test_a_server_without_the_routes_is_told_how_to_start(api: Api) -> None:
    api.status["/init_weight_transfer_engine"] = 404
    with pytest.raises(EngineError, match=r"404.*VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"):
        attach(api)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY"])
def test_the_key_goes_to_the_server_itself_whatever_proxy_is_set(api: Api, elsewhere: Api, monkeypatch, variable: str):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, elsewhere.url)
    api.reports = [RankReport(0, 1, "tcp://a")]
    assert attach(api) == ["tcp://a"]
    assert elsewhere.calls == []


def test_the_key_does_not_follow_a_server_that_sends_it_elsewhere(api: Api, elsewhere: Api, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    api.status["/init_weight_transfer_engine"] = api.status["/is_paused"] = 302
    api.headers["Location"] = f"{elsewhere.url}/is_paused"
    for call in (lambda: attach(api), ServedEngine(api.url).start):
        with pytest.raises(EngineError, match="answered 302"):
            call()
    assert elsewhere.calls == []


def test_an_answer_without_end_is_read_to_a_limit(api: Api, monkeypatch) -> None:
    monkeypatch.setattr(slipstream.rollout.served.client, "MAX_ANSWER_BYTES", 1 << 10)
    api.answers["/is_paused"] = b'{"is_paused": ["' + b"x" * (1 << 10) + b'"]}'
    with pytest.raises(EngineError, match="gave no answer of a vLLM server: ValueError: an answer of more than 1024"):
        ServedEngine(api.url).start()


def test_an_update_pauses_first_and_resumes_last_and_a_failed_one_never_resumes(api: Api) -> None:
    engine = ServedEngine(api.url)
    engine.start()
    engine.finish()
    start = ["/is_paused", "/pause?mode=keep&clear_cache=true", "/start_weight_update"]
    assert [path for path, _ in api.calls] == [*start, "/finish_weight_update", "/resume"]
    api.calls.clear()
    api.status = {"/finish_weight_update": 500, "/update_weights": 500}
    with pytest.raises(EngineError, match="/finish_weight_update answered 500"):
        engine.finish()
    engine.abandon("broken")
    assert api.calls[1:] == [("/update_weights", {"update_info": {"abort": "broken"}})]


@pytest.mark.parametrize("is_paused", [b'{"is_paused": false}', b'{"is_paused": true}', b"{}"])
@pytest.mark.parametrize("refused", ["/start_weight_update", "/pause?mode=keep&clear_cache=true"])
def test_a_start_that_fails_lets_an_engine_serve_on_that_served_before(
    refused: str, is_paused: bytes, api: Api
) -> None:
    api.answers["/is_paused"] = is_paused
    api.status = {refused: 500, "/update_weights": 500}
    with pytest.raises(EngineError, match="answered 500"):
        ServedEngine(api.url).start()
    paths = [path for path, _ in api.calls]
    # One that stood still may hold weights of no version: an update before may have failed.
    assert paths[-2:] == (["/update_weights", "/resume"] if b"false" in is_paused else [refused, "/update_weights"])


@pytest.mark.parametrize(
    ("address", "host"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.1"), ("192.0.2.1", "192.0.2.1")]
)
def test_an_engine_is_reached_at_loopback_where_it_runs_on_this_machine(address: str, host: str) -> None:
    """The last one is nobody's (TEST-NET-1)."""
    engine = ServedEngine(f"http://{address}:8000")
    assert (engine.host, engine.url) == (host, f"http://{address}:8000")


def test_user_and_password_of_an_address_go_into_requests_and_not_into_its_name(api: Api) -> None:
    engine = ServedEngine(api.url.replace("//", "//me:sword%2Ffish%2C%40@"))
    assert engine.url == api.url
    engine.pause()
    assert api.authorization == "Basic " + base64.b64encode(b"me:sword/fish,@").decode()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 100\r\n\r\nno",
    ],
    ids=["another protocol", "cut", "a page", "no text", "a cut error"],
)
def test_a_server_of_another_kind_is_no_healthy_engine_and_no_traceback(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine = ServedEngine(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as request:
                    while request.readline().strip():  # to the end: one that is closed with bytes unread is reset
                        pass
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert not engine.is_healthy()
        with pytest.raises(EngineError, match=r"gave no answer of a vLLM server|answered 500"):
            engine.pause()
        thread.join(120)
