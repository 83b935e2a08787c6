"""A Grafana server over HTTP: retries, time limits, and errors that say what to do. The token is shown nowhere.

The transport is grafana-api (thin, on requests); only its verbs are used, so that every endpoint can be reached.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from grafana_api.grafana_api import GrafanaAPI, GrafanaException

from dlc_sentinel.errors import GrafanaError
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json

TRIES = 4
FIRST_PAUSE_S = 0.5
TIMEOUT_S = 10.0
MAX_CAUSES = 64
_AGAIN = frozenset({429, 500, 502, 503, 504})
_WHY = {
    400: "it does not accept this",
    401: "the token is not accepted; make one under Administration > Service accounts, role Editor, and name its file",
    403: "the token may not do this; it needs the role Editor (Admin for data sources)",
    404: "no such page; is the address that of Grafana, with its path (as in https://host/grafana)?",
    409: "something else already has this name or uid; rename it there, or --force",
    412: "it was changed there in the meantime, or another dashboard has its name; look at it, or --force overwrites",
    422: "it does not accept this",
}


class Api(Protocol):
    """What provisioning and annotations need of a Grafana."""

    def find(self, path: str) -> Json | None:
        """The JSON at /api + path; None where Grafana says 404."""

    def send(self, method: str, path: str, body: Mapping[str, Json], headers: Mapping[str, str] | None = None) -> Json:
        """The answer to a POST or PUT."""


class Grafana:
    """One server. `secret` is a token, or user:password. Raises: GrafanaError for an address that is none."""

    def __init__(self, url: str, secret: str, *, pause: Callable[[float], object] | None = None) -> None:
        parts = _parts(url)
        self._secret = secret.strip()
        if not self._secret:
            raise GrafanaError(f"{self._shown(parts)}: no token; give --token-file FILE or set GRAFANA_TOKEN")
        user, colon, password = self._secret.partition(":")
        self._shown_url = self._shown(parts)
        self._pause = pause or threading.Event().wait
        host = parts.hostname or ""
        prefix = parts.path.strip("/")
        self._api = GrafanaAPI(
            (user, password) if colon else self._secret,
            host=f"[{host}]" if ":" in host else host,
            port=parts.port,
            url_path_prefix=f"{prefix}/" if prefix else "",
            protocol=parts.scheme,
            timeout=TIMEOUT_S,
        )
        if _is_local(host):
            self._api.s.trust_env = False  # a proxy of the environment is not asked for what is on this machine

    def find(self, path: str) -> Json | None:
        try:
            return self._call("GET", path, None, None)
        except GrafanaError as error:
            if error.status == 404:
                return None
            raise

    def send(self, method: str, path: str, body: Mapping[str, Json], headers: Mapping[str, str] | None = None) -> Json:
        return self._call(method, path, dict(body), dict(headers or {}))

    def _call(self, method: str, path: str, body: dict[str, Json] | None, headers: dict[str, str] | None) -> Json:
        """Raises: GrafanaError when the last try failed, or at once where another try would fail alike."""
        pause_s = FIRST_PAUSE_S
        for left in reversed(range(TRIES)):
            try:
                return getattr(self._api, method)(path, json=body, headers=headers)
            except GrafanaException as error:
                if error.status_code not in _AGAIN or not left:
                    raise self._refused(method, path, error) from None
            except ValueError:
                return {}  # done, and nothing said
            except OSError as error:
                if not left:
                    raise self._unreachable(error) from None
            self._pause(pause_s)
            pause_s *= 2
        raise AssertionError("the last try returns or raises")

    def _refused(self, method: str, path: str, error: GrafanaException) -> GrafanaError:
        answer = error.response
        said = self._hidden(plain(answer.get("message", answer) if isinstance(answer, dict) else answer, 300))
        why = _WHY.get(error.status_code, "it failed there; see Grafana's own log")
        return GrafanaError(
            f"{self._shown_url}: {method} /api{plain(path, 120)}: {error.status_code}, {why} (it said: {said})",
            error.status_code,
        )

    def _unreachable(self, error: OSError) -> GrafanaError:
        reason = self._hidden(plain(_cause(error), 120))
        return GrafanaError(
            f"{self._shown_url}: cannot be reached after {TRIES} tries ({reason}); is Grafana running there, and is "
            "the address right?"
        )

    def _hidden(self, text: str) -> str:
        """The text without the secret, should a server or library have put it there."""
        for part in {self._secret, *self._secret.split(":")}:
            text = text.replace(part, "(hidden)") if len(part) > 3 else text
        return text

    @staticmethod
    def _shown(parts: SplitResult) -> str:
        port = f":{parts.port}" if parts.port else ""
        return plain(f"{parts.scheme}://{parts.hostname}{port}{parts.path}")


def _cause(error: BaseException) -> str:
    """What the system said, out of the layers that the libraries wrap around it: "Connection refused"; else a name."""
    waiting: list[object] = [error]
    for seen in waiting:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        if isinstance(seen, BaseException):
            waiting += [*seen.args, seen.__cause__, seen.__context__, getattr(seen, "reason", None)]
        if len(waiting) > MAX_CAUSES:
            break
    return type(error).__name__


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise GrafanaError(f"{plain(url.rpartition('@')[2])}: not an address ({plain(error)})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise GrafanaError(f"{plain(url.rpartition('@')[2])}: wanted http://host:3000 or https://host/path")
    if parts.username or parts.password:
        raise GrafanaError(f"{parts.hostname}: no user or password in the address, please; put them into --token-file")
    return parts


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
