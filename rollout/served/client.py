"""Drives a served vLLM from outside: its control API over HTTP, and the socket on which its ranks report.

Owns the requests of one weight update, their order, and the socket on which engine ranks say where their endpoints are.

    attach      /init_weight_transfer_engine   every rank reports its endpoint, or why it cannot be written
    start       /pause?mode=keep, /start_weight_update
      ... weight_sync.api publishes to the endpoints ...
    finish      /finish_weight_update, /resume
    abandon     /update_weights {"abort": reason}: an update that failed is over; the engine stays paused
    undo        abandon, /resume: the update ended before anything was sent, and the engine served before it

The server must run with VLLM_SERVER_DEV_MODE=1: vLLM has these routes in no other mode. They are not authenticated, and
/init_weight_transfer_engine carries the update's key, so keep the server on a trusted network.
"""

import contextlib
import json
import logging
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import httpx
import zmq

from slipstream.conf.errors import ConfigError
from slipstream.conf.failures import in_words, undone_by
from slipstream.rollout.errors import EngineError
from slipstream.weight_sync.calls.curve import connect_guarded, frames_of, serve_guarded
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.typed_msgpack import pack, unpack

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HEALTH_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 << 20
MODES_HINT = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "slipstream"}\''


@dataclass(slots=True)
class RankReport:
    """What one engine rank says after init_weight_transfer_engine: an endpoint, or an error's class and text."""

    rank: int
    num_ranks: int
    endpoint: str = ""
    error: str = ""
    text: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that its start took, by step."""
    is_expected: bool = False
    """Whether its layout was proven to be the one whose digest was given, without recording every layer."""


def send_report(address: str, key: bytes, report: RankReport, *, timeout_s: float) -> None:
    """Send a report to the sender at `address`; there is no answer. Waits at most `timeout_s` until it was read. Raises
    zmq.ZMQError if the address is not valid."""
    context = zmq.Context()
    sending = context.socket(zmq.PUSH)
    sending.setsockopt(zmq.LINGER, int(timeout_s * 1000))
    connect_guarded(sending, key)
    try:
        sending.connect(address)
        sending.send_multipart(frames_of(pack(report)))
    finally:
        sending.close()
        context.term()


class Rendezvous:
    """The sender's socket for reports, to which nobody can speak without the update's key."""

    def __init__(self, key: bytes, host: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        serve_guarded(self._socket, key)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"

    def receive(self, timeout_s: float) -> RankReport | None:
        if timeout_s <= 0 or not self._socket.poll(int(timeout_s * 1000) + 1):
            return None
        return unpack(RankReport, b"".join(self._socket.recv_multipart()))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ServedEngine:
    """One `vllm serve`, by the address of its API, for example "http://127.0.0.1:8000"; ConfigError if it is none."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        parts = _split(url)
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        """Without user and password: messages, logs and reports name it."""
        try:
            host = socket.gethostbyname(str(parts.hostname))
        except OSError as e:
            raise ConfigError(
                f"--to {self.url}: there is no host {parts.hostname!r} with an address of IPv4, over which weights go "
                f"({e.strerror})"
            ) from e
        self.host = LOOPBACK if is_own_address(host) else host
        """Address at which senders reach its ranks. Loopback if it is on this machine, even if it serves at another
        address, so that both ends of a link agree on whether they share a host."""
        self._timeout_s = timeout_s
        # No proxy, and no redirect is followed: requests carry the update's key and VLLM_API_KEY.
        login = None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
        self._http = httpx.Client(auth=login, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self.attached: list[RankReport] = []
        """The ranks' reports to the last attach(), by rank."""
        self._was_serving = False
        """Whether the engine was not paused when the current update was started."""

    def is_healthy(self) -> bool:
        try:
            self._request("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    def attach(
        self,
        tensors: Sequence[TensorMeta],
        key: bytes,
        rendezvous: Rendezvous,
        *,
        transport: str,
        timeout_s: float,
        layouts: Sequence[str] = (),
        landing_bytes: int = 0,
    ) -> list[str]:
        """Ask every rank to open an endpoint, and to set `landing_bytes` aside for changes. Returns their addresses, by
        rank. Raises EngineError if the server has no such route, or a rank refused: with the rank's own reason.
        `layouts`: by rank, the digest of the layout that it should have, recorded over all layers."""
        info = {
            "tensors": [[meta.name, list(meta.shape), meta.dtype] for meta in tensors],
            "key": key.hex(),
            "report_to": rendezvous.address,
            "host": self.host,
            "transport": transport,
            "timeout_s": timeout_s,
            "layouts": list(layouts),
            "landing_bytes": landing_bytes,
        }
        refused: EngineError | None = None
        try:
            self._request("POST", "/init_weight_transfer_engine", {"init_info": info})
        except EngineError as e:
            refused = e  # if the ranks got that far, a report gives the reason
        reports: dict[int, RankReport] = {}
        wait_s = 2.0 if refused is not None else timeout_s
        while not reports or len(reports) < next(iter(reports.values())).num_ranks:
            report = rendezvous.receive(wait_s)
            if report is None:
                break
            if report.error:
                raise EngineError(f"{self.url}, rank {report.rank}: {report.error}: {report.text}")
            reports[report.rank] = report
        if refused is not None:
            raise refused
        if not reports or len(reports) < next(iter(reports.values())).num_ranks:
            raise EngineError(f"{self.url}: {len(reports)} ranks reported within {timeout_s:g} s; see the server's log")
        self.attached = [reports[rank] for rank in sorted(reports)]
        return [report.endpoint for report in self.attached]

    def pause(self) -> None:
        """Freeze requests in flight and hold new ones."""
        self._request("POST", "/pause?mode=keep&clear_cache=true")

    def start(self) -> None:
        """Pause the engine and let the ranks' endpoints begin. If either fails, the engine goes on as before."""
        answer = self._request("GET", "/is_paused")
        self._was_serving = isinstance(answer, dict) and answer.get("is_paused") is False
        with undone_by(lambda error: self.undo(in_words(error))):
            self.pause()
            self._request("POST", "/start_weight_update")

    def finish(self) -> None:
        """Serve the version that all ranks have committed."""
        self._request("POST", "/finish_weight_update", {})
        self._request("POST", "/resume")

    def abandon(self, reason: str) -> None:
        """End an update that failed, so that another can start. The engine stays paused, with weights of no version."""
        try:
            self._request("POST", "/update_weights", {"update_info": {"abort": reason}})
        except EngineError as e:  # always: this is how vLLM ends an update without finishing it
            logger.debug("%s gave up the update: %s", self.url, e)

    def undo(self, reason: str) -> None:
        """End an update that sent no byte, and resume the engine if it was serving before. (One that was paused may
        hold weights of no version, from an earlier update that failed.)"""
        self.abandon(reason)
        if not self._was_serving:
            return
        try:
            self._request("POST", "/resume")
        except EngineError as e:  # the error that ended the update is the one to report
            logger.warning("%s could not be resumed: %s", self.url, e)

    def _request(self, verb: str, path: str, body: object = None, *, timeout_s: float | None = None) -> Any:
        token, text = os.environ.get("VLLM_API_KEY"), bytearray()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout_s = timeout_s or self._timeout_s
        try:
            with self._http.stream(verb, self.url + path, json=body, headers=headers, timeout=timeout_s) as answer:
                for part in answer.iter_bytes():
                    text += part
                    if len(text) > MAX_ANSWER_BYTES:
                        raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            if answer.is_success:
                return json.loads(text) if text else None
        except (httpx.ProtocolError, httpx.DecodingError, ValueError) as e:  # another kind of server, or cut
            raise EngineError(f"{self.url}{path} gave no answer of a vLLM server: {type(e).__name__}: {e}") from e
        except httpx.TransportError as e:
            raise EngineError(f"{self.url}{path} cannot be reached: {e or type(e).__name__}") from e
        hint = f"; {MODES_HINT}" if answer.status_code == 404 else ""
        said = text[:500].decode(errors="replace")
        raise EngineError(f"{self.url}{path} answered {answer.status_code}: {said}{hint}")


def _split(url: str) -> SplitResult:
    """The parts of an engine's address. The message of ConfigError leaves out user and password."""
    with contextlib.suppress(ValueError):  # brackets without an address of IPv6, or a port that is no number
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_whole = not (parts.path.strip("/") or parts.query or parts.fragment)
        if parts.scheme in ("http", "https") and parts.hostname and is_whole and parts.port != 0:
            return parts
    shown = re.sub(r"^(\w+://)?.*@", r"\1", url)
    hint = "; / in a user or a password is written %2F, ? %3F and # %23" if "@" in url else ""
    raise ConfigError(f"--to takes addresses of vLLM servers such as http://127.0.0.1:8000, got {shown!r}{hint}")


def is_own_address(host: str) -> bool:
    """Whether an IPv4 address belongs to this machine; the wildcard does."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
