"""The routes of the page, behind one guard: local names only, no foreign origin, nothing obeyed without the token."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dlc_sentinel.records import Snapshot
from dlc_sentinel.web import view

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_BODY_BYTES = 4096
RESET_PATH = "/api/v1/actions/reset"
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/strips.js": ("strips.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uPlot.LICENSE": ("uPlot.LICENSE", "text/plain; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(slots=True)
class State:
    """What the routes read. `reset` is set once the sentinel allows resets: (token, what to call with a run)."""

    snapshot: Snapshot | None = None
    reset: tuple[str, Callable[[str], None]] | None = None


def build(state: State) -> ASGIApp:
    """The application: pages from memory, the snapshot as the page wants it, health, and one route that changes."""
    routes = [Route(path, _static(*entry), methods=["GET"]) for path, entry in STATIC.items()]
    routes += [
        Route("/healthz", lambda request: PlainTextResponse("alive\n"), methods=["GET"]),
        Route("/readyz", lambda request: _ready(state), methods=["GET"]),
        Route("/api/v1/page", lambda request: _page(state, request), methods=["GET"]),
        Route(RESET_PATH, lambda request: _reset(state, request), methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes))


class Guard:
    """Answers 403 to what did not come from this machine's own browser or shell, and puts HEADERS on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        assert scope["type"] == "http"  # no lifespan, no websockets: switched off in sink.py
        refusal = refused(scope["method"], scope["path"], Headers(scope=scope))
        app = self._app if refusal is None else PlainTextResponse(f"{refusal}\n", 403)
        await app(scope, receive, guarded)


def refused(method: str, path: str, headers: Headers) -> str | None:
    """Why a request is not answered; None where it may be.

    A page of another site whose name is made to resolve to 127.0.0.1 is caught by Host, one that sends requests across
    by Origin or Sec-Fetch-Site. A link from elsewhere may open the page itself.
    """
    hosts = headers.getlist("host")
    if len(hosts) != 1 or _hostname(f"//{hosts[0]}") not in LOCAL_NAMES:
        return "this port answers local names only (127.0.0.1, localhost)"
    origins = headers.getlist("origin")
    if origins and origins != [f"http://{hosts[0]}"]:
        return "requests of other origins are not answered"
    site = headers.get("sec-fetch-site", "none")
    opens = method == "GET" and path == "/" and headers.get("sec-fetch-mode") == "navigate"
    if site not in ("none", "same-origin") and not opens:
        return "requests of other sites are not answered"
    return None


def _hostname(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _static(name: str, media_type: str) -> Callable[[Request], Response]:
    body = files("dlc_sentinel.web").joinpath("static", name).read_bytes()
    return lambda request: Response(body, media_type=media_type)


def _ready(state: State) -> Response:
    snapshot = state.snapshot
    if snapshot is None:
        return PlainTextResponse("not ready: nothing published yet\n", 503)
    if not any(producer.get("state") == "alive" for run in snapshot.runs for producer in run.producers):
        return PlainTextResponse("not ready: no producer is alive; is DLC_SENTINEL set in the job?\n", 503)
    return PlainTextResponse("ready\n")


def _page(state: State, request: Request) -> Response:
    if state.snapshot is None:
        return PlainTextResponse("nothing published yet\n", 503)
    since = request.query_params.get("since", "-1")
    if not (since.isascii() and since.removeprefix("-").isdigit() and len(since) <= 18):
        return PlainTextResponse("since: got no number, wanted a step\n", 400)
    shown = view.page(state.snapshot, request.query_params.get("run"), int(since))
    return Response(json.dumps(shown, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _reset(state: State, request: Request) -> Response:
    if state.reset is None:
        return PlainTextResponse("this sentinel takes no resets\n", 403)
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        return PlainTextResponse("no body is wanted\n", 413)
    token, apply = state.reset
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        return PlainTextResponse("wanted the sentinel's token as `Authorization: Bearer`\n", 401)
    run = request.query_params.get("run", "")
    if run not in {known.run for known in (state.snapshot.runs if state.snapshot else ())}:
        return PlainTextResponse("run: no run of that name here\n", 404)
    apply(run)
    return JSONResponse({"reset": run}, 202)
