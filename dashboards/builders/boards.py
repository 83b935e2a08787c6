"""All boards, listed: file name -> the function that builds its JSON object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dashboards.builders import engine, health, lag, learning, overview

BOARDS: dict[str, Callable[[], dict[str, Any]]] = {
    "dlc-overview.json": overview.build,
    "dlc-lag.json": lag.build,
    "dlc-engine.json": engine.build,
    "dlc-learning.json": learning.build,
    "dlc-health.json": health.build,
}
