"""Every error the package raises on purpose.

SentinelError
├── ShapeError      (ValueError)    arrays that disagree: the message carries the numbers
├── RecordError     (ValueError)    a record whose fields contradict each other
├── FrameError      (ValueError)    bytes that are no frame: carries the refusal `cause`
├── ConfigError     (ValueError)    an unknown key, a bad value; names the origin and the nearest key
├── AddressError    (ValueError)    an address that cannot be parsed or is not allowed without keys
├── AddressInUse    (OSError)       another sentinel holds the address
├── KeysError       (OSError)       CURVE key files that are missing or readable by others
├── TapeError       (OSError)       a tape or file that cannot be read at all
└── GrafanaError    (OSError)       Grafana refused or could not be reached; `status` is its HTTP answer, 0 = none

Each is also the standard-library type a caller would catch. The message says what, where, got, wanted, next move.
"""

from __future__ import annotations

__all__ = [
    "AddressError",
    "AddressInUse",
    "ConfigError",
    "FrameError",
    "GrafanaError",
    "KeysError",
    "RecordError",
    "SentinelError",
    "ShapeError",
    "TapeError",
]


class SentinelError(Exception):
    """Base of all errors of this package."""


class ShapeError(SentinelError, ValueError):
    """Arrays that should have one length do not."""


class RecordError(SentinelError, ValueError):
    """A record's fields contradict each other."""


class FrameError(SentinelError, ValueError):
    """Bytes that are not a frame this version reads; `cause` is the refusal they are counted under."""

    def __init__(self, message: str, cause: str = "unparsable") -> None:
        super().__init__(message)
        self.cause = cause


class ConfigError(SentinelError, ValueError):
    """A setting that is unknown or out of range."""


class AddressError(SentinelError, ValueError):
    """An address that cannot be used as asked."""


class AddressInUse(SentinelError, OSError):
    """The address is held by another sentinel that is alive."""


class KeysError(SentinelError, OSError):
    """CURVE key files are missing, malformed or readable by others."""


class TapeError(SentinelError, OSError):
    """A tape or input file cannot be opened or holds nothing readable."""


class GrafanaError(SentinelError, OSError):
    """Grafana could not be reached, or did not do what it was asked; the message says why and what to do."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
