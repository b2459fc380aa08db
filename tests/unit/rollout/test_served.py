"""A served engine is asked in the one order that is safe, and its refusals reach the user with their reason."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import zmq

from rollout.errors import EngineError
from rollout.served import RankReport, Rendezvous, ServedEngine
from weight_sync.layout import TensorMeta
from weight_sync.protocol import pack

KEY = b"k" * 32
TENSORS = [TensorMeta("w", (2, 3), "bfloat16")]


class Api(ThreadingHTTPServer):
    """vLLM's routes; what init_weight_transfer_engine makes of its ranks is the test's to say."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.reports: list[RankReport] = []
        self.sign_with = KEY
        self.status: dict[str, int] = {}
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        self.server.calls.append((self.path, body))
        if self.path == "/init_weight_transfer_engine":
            socket = zmq.Context.instance().socket(zmq.PUSH)
            socket.connect(body["init_info"]["report_to"])
            for report in self.server.reports:
                data = pack(report)
                socket.send_multipart([hmac.digest(self.server.sign_with, data, "sha256"), data])
            socket.close(1000)
        self.send_response(self.server.status.get(self.path, 200))
        self.end_headers()
        self.wfile.write(b"{}")

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    yield api
    api.shutdown()
    api.server_close()


def attach(api: Api, timeout_s: float = 5.0) -> list[str]:
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


def test_a_missing_rank_and_an_unsigned_report_are_not_taken_for_endpoints(api: Api) -> None:
    api.reports = [RankReport(0, 2, "tcp://a")]
    with pytest.raises(EngineError, match="1 ranks reported within"):
        attach(api, 0.3)
    api.reports, api.sign_with = [RankReport(0, 1, "tcp://evil")], b"x" * 32
    with pytest.raises(EngineError, match="0 ranks reported within"):
        attach(api, 0.3)


def test_a_server_without_the_routes_is_told_how_to_start(api: Api) -> None:
    api.status["/init_weight_transfer_engine"] = 404
    with pytest.raises(EngineError, match=r"404.*VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"):
        attach(api)


def test_an_update_pauses_first_and_resumes_last_and_a_failed_one_never_resumes(api: Api) -> None:
    engine = ServedEngine(api.url)
    engine.start()
    engine.finish()
    assert [path for path, _ in api.calls] == [
        "/pause?mode=keep&clear_cache=true",
        "/start_weight_update",
        "/finish_weight_update",
        "/resume",
    ]
    api.calls.clear()
    api.status = {"/finish_weight_update": 500, "/update_weights": 500}
    with pytest.raises(EngineError, match="/finish_weight_update answered 500"):
        engine.finish()
    engine.abandon("broken")
    assert [path for path, _ in api.calls] == ["/finish_weight_update", "/update_weights"]
    assert api.calls[-1][1] == {"update_info": {"abort": "broken"}}
