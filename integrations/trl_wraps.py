"""Methods of a live trainer replaced for as long as it is watched: each checked first, every failure ours alone."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

_log = logging.getLogger("dlc_sentinel.trl")


class Quiet:
    """The one catch-all between our code and training: a failure is said once per place and costs watching only."""

    def __init__(self) -> None:
        self.num_errors: dict[str, int] = {}
        """Failures by place."""

    def do(self, place: str, function: Callable[..., Any], *args: Any) -> Any:
        """What `function` returns, or None where it failed."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001  # nothing may raise into training
            self.num_errors[place] = self.num_errors.get(place, 0) + 1
            self.say(place, f"{place}: {type(error).__name__}: {error}; training goes on without it (said once)")
            return None

    def say(self, kind: str, text: str) -> None:
        """One warning per kind."""
        if self.num_errors.get(f"said {kind}", 0) == 0:
            self.num_errors[f"said {kind}"] = 1
            _log.warning("dlc-sentinel: %s", text)


class Wraps:
    """Replaces methods on one instance (never on the class) and puts the old ones back."""

    def __init__(self, quiet: Quiet, stack: str) -> None:
        self.names: list[str] = []
        """What is replaced now, as "Class.method"."""
        self._quiet = quiet
        self._stack = stack
        self._undo: list[Callable[[], None]] = []

    def method(self, owner: object, name: str, args: Sequence[str], make: Callable[[Any], Any], costs: str) -> bool:
        """False, and one line that names what is lost, where `owner.name` is missing or lacks one of `args`.

        `make(original)` gives the replacement. After `undo` it only passes calls on, where something else holds it.
        """
        label = f"{type(owner).__name__}.{name}"
        complaint = misfit(owner, name, args)
        if complaint:
            self._quiet.say(label, f"{self._stack}: {label} {complaint}; off: {costs}")
            return False
        original = getattr(owner, name)
        watched = make(original)
        live = [True]

        @functools.wraps(original)
        def call(*values: Any, **named: Any) -> Any:
            return (watched if live[0] else original)(*values, **named)

        setattr(owner, name, call)
        self._undo.append(functools.partial(_restore, owner, name, call, original, live))
        self.names.append(label)
        return True

    def attribute(self, owner: object, name: str, value: object) -> None:
        """Sets `owner.name`, which exists, until `undo`."""
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(functools.partial(_put_back, owner, name, value, before))

    def undo(self) -> None:
        """Everything as it was found."""
        while self._undo:
            self._undo.pop()()
        self.names.clear()


def misfit(owner: object, name: str, args: Sequence[str]) -> str:
    """Why `owner.name` is not what we know: what was got and what was wanted; "" where it fits."""
    method = getattr(owner, name, None)
    if not callable(method):
        return "does not exist"
    found = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
    if found[: len(args)] != list(args):
        return f"takes ({', '.join(found)}), wanted ({', '.join(args)}, ...) first"
    return ""


def _restore(owner: object, name: str, ours: object, original: Any, live: list[bool]) -> None:
    live[0] = False
    if vars(owner).get(name) is not ours:
        return
    delattr(owner, name)
    if getattr(owner, name, None) != original:
        setattr(owner, name, original)


def _put_back(owner: object, name: str, ours: object, before: object) -> None:
    if getattr(owner, name, None) is ours:
        setattr(owner, name, before)
