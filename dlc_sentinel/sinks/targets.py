"""Where notifications go: addresses that apprise understands. They hold secrets, so only their scheme is ever shown."""

from __future__ import annotations

import logging
import re
import stat
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import apprise

from dlc_sentinel.config import Notify
from dlc_sentinel.errors import ConfigError
from dlc_sentinel.records import Level
from dlc_sentinel.sinks.notify import NotTaken

CRITICAL_MARK = "critical="
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}(?=://)")
_STATUS = re.compile(r"\berror=(\d{3})\b")
_KINDS = {
    "INFO": apprise.NotifyType.INFO, "WARN": apprise.NotifyType.WARNING, "CRITICAL": apprise.NotifyType.FAILURE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AppriseTarget:
    """A receiver that apprise reaches."""

    name: str
    only_critical: bool
    service: apprise.NotifyBase

    def send(self, title: str, body: str, level: Level) -> bool:
        _said.cause = ""
        taken = self.service.notify(
            title=title, body=body, notify_type=_KINDS[level], body_format=apprise.NotifyFormat.TEXT
        )
        if not taken and _said.cause:
            raise NotTaken(_said.cause)
        return bool(taken)


class _Said(logging.Handler):
    """Keeps why a plug-in failed, which only its log says; of the line itself nothing is kept: it may be secret."""

    cause = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if status := _STATUS.search(text):
            self.cause = f"refused, HTTP {status.group(1)}"
        elif "connection error" in text.lower():
            self.cause = "not reached, no connection"


_said = _Said(logging.WARNING)


def targets_of(settings: Notify) -> tuple[AppriseTarget, ...]:
    """The receivers of `notify.urls` and of `notify.file`; none where both are empty.

    Raises: ConfigError for an address that apprise does not know, and for a file that is missing or that others can
    read. No message repeats an address.
    """
    # apprise's own log lines repeat addresses, and with them their secrets: nobody but us hears them.
    log = logging.getLogger("apprise")
    log.handlers, log.propagate = [_said], False
    log.setLevel(logging.WARNING)
    found = []
    for place, text in _written(settings):
        only_critical = text.startswith(CRITICAL_MARK)
        address = text.removeprefix(CRITICAL_MARK)
        name = f"{place} {hidden(address)}"
        with warnings.catch_warnings():
            # The first call imports all plug-ins, some of which use what Python 3.13 drops.
            warnings.simplefilter("ignore", DeprecationWarning)
            service = apprise.Apprise.instantiate(address, suppress_exceptions=True)
        if not isinstance(service, apprise.NotifyBase):
            raise ConfigError(
                f"{name}: none that apprise knows, or its library is missing (dbus:// needs dbus-python); wanted e.g. "
                "slack://..., pagerduty://..., mailto://..., json://host/path"
            )
        found.append(AppriseTarget(name, only_critical, service))
    return tuple(found)


def hidden(address: str) -> str:
    """The address without anything secret: "slack://(hidden)"."""
    scheme = _SCHEME.match(address)
    return f"{scheme.group().lower()}://(hidden)" if scheme else "(hidden)"


def _written(settings: Notify) -> Iterator[tuple[str, str]]:
    """(where it stands, address with its mark) of every target."""
    for number, text in enumerate(settings.urls.split(), start=1):
        yield f"notify.urls {number}", text
    if settings.file:
        for number, line in enumerate(_lines(Path(settings.file)), start=1):
            text = "".join(line.split())
            if text and not text.startswith("#"):
                yield f"notify.file line {number}", text


def _lines(path: Path) -> Sequence[str]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(f"notify.file {path}: others can read it (mode {mode:04o}); chmod 600 it")
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"notify.file {path}: cannot be read ({type(error).__name__})") from error
