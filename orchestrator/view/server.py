"""The page over HTTP: files of the page, and what it asks about runs, as JSON.

    GET /                         the page; nothing of a run is in it
    GET /static/NAME              its scripts, style and plots
    GET /api/...                  of runs; only with the token

Owns: addresses, the token, headers. Does not own: what is answered (run_reader.py).
Invariants: it listens on loopback alone. Without `Authorization: Bearer TOKEN` nothing of a run is told: the token is
in the printed address behind `#`, which browsers keep to themselves, so that no other page can make one's browser ask.
A name other than a loopback one in `Host` is refused (DNS rebinding). Only GET is there, and nothing is written. The
page may run its own scripts and talk to its own server, and do nothing else (Content-Security-Policy); whatever comes
from a run is inserted as text.
"""

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import TypeVar

from aiohttp import web

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.view.run_reader import RunReader
from slipstream.orchestrator.view.samples import parse_query, whole

logger = logging.getLogger(__name__)
T = TypeVar("T")
HOST = "127.0.0.1"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = files("slipstream.orchestrator.view") / "static"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MODULES = (
    "format.js", "dom.js", "source.js", "curves.js", "timeline.js", "fleet.js", "sample_detail.js", "samples.js",
    "options.js", "main.js",
)  # fmt: skip
"""Each after those that it imports from."""
PAGE_FILES = ("index.html", "style.css", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", *MODULES)
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


def page_file(name: str) -> str:
    return STATIC.joinpath(name).read_text(encoding="utf-8")


class ViewServer:
    """Serves the page for some runs, from `start` to `stop`. `port`: 0: any that is free."""

    def __init__(self, readers: Sequence[RunReader], port: int) -> None:
        self._readers = readers
        self._locks = [asyncio.Lock() for _ in readers]
        self._port = port
        self._runner: web.AppRunner | None = None
        self.token = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self._port}/#token={self.token}"

    async def start(self) -> None:
        """Listen. Raises ConfigError: the port is taken, or not for this user."""
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", self._page_file)
        app.router.add_get("/static/{name:.+}", self._page_file)
        app.router.add_get("/api/runs", self._runs)
        app.router.add_get("/api/runs/{run:[0-9]+}/{what}", self._of_run)
        app.router.add_get("/api/runs/{run:[0-9]+}/{what}/{name}", self._of_run)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"port {self._port} cannot be listened on ({error.strerror}); choose another one with --port, or leave "
                "it out for any that is free"
            ) from error
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.host.rsplit(":", 1)[0] not in _LOCAL_NAMES:
            return _answer({"error": "this page is for this machine alone"}, 403)
        if request.path.startswith("/api/"):
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), self.token.encode()):
                return _answer({"error": "open the address that slipstream view printed: it has the token"}, 401)
        try:
            return await handler(request)
        except ConfigError as error:
            return _answer({"error": str(error)}, 400)
        except web.HTTPException as error:
            return _answer({"error": error.reason}, error.status)
        except Exception as error:  # files of a run that goes on, or of another program
            logger.exception("%s could not be answered", request.path)
            return _answer({"error": f"a file of the run cannot be understood ({type(error).__name__}: {error})"}, 500)

    async def _page_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", "index.html")
        if name not in PAGE_FILES:
            raise web.HTTPNotFound
        kind = TYPES["." + name.rpartition(".")[2]]
        return web.Response(text=page_file(name), content_type=kind, headers=HEADERS)

    async def _runs(self, _: web.Request) -> web.StreamResponse:
        found = [await self._ask(number, lambda reader: reader.summary()) for number in range(len(self._readers))]
        return _answer({"runs": found})

    async def _of_run(self, request: web.Request) -> web.StreamResponse:
        number, what, name = int(request.match_info["run"]), request.match_info["what"], request.match_info.get("name")
        if number >= len(self._readers):
            raise web.HTTPNotFound
        words = dict(request.query)
        return _answer(await self._ask(number, lambda reader: answer(reader, what, name, words)))

    async def _ask(self, number: int, question: Callable[[RunReader], T]) -> T:
        async with self._locks[number]:
            return await asyncio.to_thread(question, self._readers[number])


def answer(reader: RunReader, what: str, name: str | None, words: Mapping[str, str]) -> JsonObject:
    """What a run's address says. Addresses are /api/runs/N/WHAT or /api/runs/N/WHAT/NAME. Raises ConfigError: there is
    no such thing, or it is asked for in a way that makes no sense."""
    match what, name:
        case "options", None:
            return reader.options
        case "environment", None:
            return reader.environment()
        case "fleet", None:
            return reader.fleet()
        case "metrics", None:
            names = words.get("names")
            return reader.metrics(names.split(",") if names else None, whole(words, "after_row") or 0)
        case "samples", None:
            return reader.samples(parse_query(words))
        case "sample", str():
            return reader.sample(
                whole({"sample": name}, "sample") or 0,
                first_token=whole(words, "first_token") or 0,
                first_char=whole(words, "first_char") or 0,
            )
        case "timeline", None:
            return reader.steps_with_timeline()
        case "timeline", str():
            return reader.timeline(whole({"step": name}, "step") or 0)
        case "trace", str():
            return reader.trace(name)
        case _:
            raise ConfigError(f"there is no {what!r} of a run")


def _answer(content: object, status: int = 200) -> web.Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return web.Response(text=text, status=status, content_type="application/json", headers=HEADERS)
