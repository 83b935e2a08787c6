"""Snapshot <-> JSON, and fetching one over HTTP: what `watch` shows is what the sentinel published.

NaN and infinities are written as null (JSON has neither). Read back, a null is NaN in a number of the carrier itself
and stays null inside the objects of the file format, where null is the word for "not known".
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import fields
from http import HTTPStatus
from http.client import HTTPException, InvalidURL
from typing import cast, get_args

from dlc_sentinel.errors import RecordError
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Event, Json, Level, RunSnapshot, Snapshot

SCHEMA = 1
PATH = "/api/v1/snapshot"
MAX_BYTES = 64 * 2**20
METRICS_PORT = "a sentinel's metrics port (9877 unless set; 9878 is the page's)"


def encode(snapshot: Snapshot, *, history: int = 512) -> str:
    """The snapshot as one JSON object on one line; of each run only the newest `history` steps."""
    runs = [_run_object(run, history) for run in snapshot.runs]
    tree = {
        "schema": SCHEMA,
        "t_s": snapshot.t_s,
        "started_s": snapshot.started_s,
        "version": snapshot.version,
        "runs": runs,
        "num_refused": snapshot.num_refused,
    }
    return json.dumps(strict(tree), allow_nan=False, separators=(",", ":"))


def decode(text: str | bytes) -> Snapshot:
    """The snapshot that `encode` wrote. Raises: RecordError naming what is missing or of the wrong type."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"snapshot: not JSON ({plain(error)}); is the URL that of {METRICS_PORT}?") from error
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
        got = tree.get("schema") if isinstance(tree, dict) else type(tree).__name__
        raise RecordError(f"snapshot: schema {plain(got)}, wanted {SCHEMA}; use the same version on both sides")
    try:
        return Snapshot(
            t_s=_float(tree["t_s"]),
            started_s=_float(tree["started_s"]),
            version=str(tree["version"]),
            runs=tuple(_run(run) for run in tree["runs"]),
            num_refused={str(cause): int(count) for cause, count in tree["num_refused"].items()},
        )
    except KeyError as error:
        raise RecordError(f"snapshot: no field {plain(error)}; use the same version on both sides") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RecordError(f"snapshot: a field of the wrong type ({plain(error)})") from error


def fetch(url: str, *, timeout_s: float = 5.0, history: int = 512) -> Snapshot:
    """The snapshot of the sentinel at `url` (http://host:port). Raises: OSError if unreachable, RecordError if odd.

    A proxy of the environment is not used: the sentinel is on this host or behind an ssh tunnel.
    """
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}{PATH}?history={history}", timeout=timeout_s) as answer:
            body = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
            raise OSError(f"{plain(url)}: it is still starting: try again in a moment") from error
        raise OSError(f"{plain(url)}: answered {error.code} {plain(error.reason)}; is it {METRICS_PORT}?") from error
    except urllib.error.URLError as error:
        raise OSError(f"{plain(url)}: {plain(error.reason)}; is `dlc-sentinel serve` running there?") from error
    except (ValueError, InvalidURL) as error:
        raise OSError(f"{plain(url)}: not a usable address ({plain(error)})") from error
    except HTTPException as error:
        what = plain(f"{type(error).__name__}: {error}", 120)
        raise OSError(f"{plain(url)}: no whole HTTP answer ({what}); is it {METRICS_PORT}?") from error
    except OSError as error:
        raise OSError(f"{plain(url)}: no whole HTTP answer ({plain(error)}); is it {METRICS_PORT}?") from error
    if len(body) > MAX_BYTES:
        raise RecordError(f"snapshot: more than {MAX_BYTES} bytes from {plain(url)}")
    return decode(body)


def _run_object(run: RunSnapshot, history: int) -> dict[str, Json]:
    tree = {field.name: getattr(run, field.name) for field in fields(run)}
    tree["history"] = run.history[-history:] if history > 0 else ()
    tree["scalars"] = run.scalars[-history:] if history > 0 else ()
    tree["events"] = [{field.name: getattr(event, field.name) for field in fields(event)} for event in run.events]
    return tree


def strict(value: Json) -> Json:
    """Numbers of numpy become Python's, anything not finite becomes null, mappings and sequences are copied."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict(item) for item in value]
    if hasattr(value, "tolist"):
        return strict(value.tolist())
    return str(value)


def _run(tree: dict[str, Json]) -> RunSnapshot:
    counts = {
        name: {str(key): int(count) for key, count in tree[name].items()}
        for name in ("num_tokens", "dropped_tokens", "refused_frames", "num_commands")
    }
    step = tree["step"]
    return RunSnapshot(
        run=str(tree["run"]),
        model_name=str(tree["model_name"]),
        engines=tuple(str(engine) for engine in tree["engines"]),
        mode=str(tree["mode"]),
        verdict=str(tree["verdict"]),
        last_step=int(tree["last_step"]),
        step=None if step is None else _object(step),
        history=tuple(_object(item) for item in tree["history"]),
        findings=tuple(_object(item) for item in tree["findings"]),
        commands=tuple(_object(item) for item in tree["commands"]),
        events=tuple(_event(item) for item in tree["events"]),
        producers=tuple(_object(item) for item in tree["producers"]),
        num_tokens=counts["num_tokens"],
        dropped_tokens=counts["dropped_tokens"],
        refused_frames=counts["refused_frames"],
        num_frames=int(tree["num_frames"]),
        sequence_gaps=int(tree["sequence_gaps"]),
        join_bytes=int(tree["join_bytes"]),
        num_commands=counts["num_commands"],
        verdict_latency_s=_float(tree["verdict_latency_s"]),
        breaker_open=bool(tree["breaker_open"]),
        action_horizon=int(tree["action_horizon"]),
        **{name: tuple(_object(item) for item in tree[name]) for name in ("worst", "scalars", "synced", "about")},
    )


def _event(tree: dict[str, Json]) -> Event:
    level = tree["level"]
    if level not in get_args(Level):
        raise ValueError(f"level {level!r}")
    return Event(
        kind=tree["kind"],
        run=str(tree["run"]),
        step=int(tree["step"]),
        t_s=_float(tree["t_s"]),
        level=cast(Level, level),
        text=str(tree["text"]),
        data=_object(tree["data"]),
    )


def _object(tree: Json) -> dict[str, Json]:
    if not isinstance(tree, dict):
        raise TypeError(f"got {type(tree).__name__}, wanted an object")
    return tree


def _float(value: Json) -> float:
    return math.nan if value is None else float(value)
