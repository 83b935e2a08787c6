"""What was sent and who is there: commands, producers, events."""

from __future__ import annotations

import math

from rich.text import Text

from dlc_sentinel.catalog import number
from dlc_sentinel.plaintext import plain
from dlc_sentinel.ui.charts import BAD, DIM, GOOD, WARN
from dlc_sentinel.ui.page import Page, ago, cut, fit, title

_WHAT = ("step", "kind", "action")


def commands(page: Page, width: int, num_lines: int) -> list[Text]:
    """Commands sent, newest first, and what came of each."""
    found = [title(page, f"commands, mode {plain(page.run.mode, 12)}", width)]
    if not page.run.commands:
        found.append(Text("none sent", style=DIM))
    for command in sorted(
        page.run.commands, key=lambda c: -number(c, "step") if math.isfinite(number(c, "step")) else 0.0
    ):
        outcome = plain(command.get("outcome") or "sent", 14)
        version = number(command, "version")
        line = Text()
        line.append(
            " ".join(plain(command.get(key) if command.get(key) is not None else "", 14) for key in _WHAT) + " "
        )
        line.append(page.glyphs.arrow + " ")
        line.append(
            outcome.upper() if outcome in ("refused", "expired") else outcome,
            style={"applied": GOOD, "refused": WARN, "expired": WARN}.get(outcome, ""),
        )
        line.append(f" v{version:.0f}" if version >= 0 else "")
        line.append(f"  {plain(command.get('reason') or '')}", style=DIM)
        found.append(fit(line, width))
    return cut(found, num_lines + 1, width)


def producers(page: Page, width: int, num_lines: int) -> list[Text]:
    """Hooks, the silent and gone ones first."""
    order = {"gone": 0, "silent": 1}
    rows = sorted(page.run.producers, key=lambda p: order.get(str(p.get("state")), 2))
    num_alive = sum(p.get("state") == "alive" for p in rows)
    found = [title(page, f"producers: {num_alive} of {len(rows)} alive", width)]
    if not rows:
        found.append(Text("none seen: is DLC_SENTINEL set in the job?", style=WARN))
    for producer in rows:
        state = plain(producer.get("state") or "unknown", 10)
        role = plain(producer.get("role"), 8)
        name = (
            f"{role} replica {plain(producer.get('replica'), 20)}"
            if role == "engine"
            else f"{role} rank {plain(producer.get('rank'), 8)}"
        )
        silence_s = page.now_s - number(producer, "last_seen_s")
        line = Text(f"{name} ")
        line.append(state if state == "alive" else state.upper(), style=GOOD if state == "alive" else WARN)
        line.append(f" {ago(silence_s)}" if math.isfinite(silence_s) else "")
        line.append(f" step {plain(producer.get('last_step'), 10)} {plain(producer.get('host') or '', 30)}", style=DIM)
        found.append(fit(line, width))
    return cut(found, num_lines + 1, width)


def events(page: Page, width: int, num_lines: int) -> list[Text]:
    """The newest events first."""
    found = [title(page, "events", width)]
    if not page.run.events:
        found.append(Text("none", style=DIM))
    for event in reversed(page.run.events):
        line = Text().append(f"{event.step if event.step >= 0 else '':>6} ", style=DIM)
        line.append(f"{event.kind} ", style={"CRITICAL": BAD, "WARN": WARN}.get(event.level, ""))
        line.append(plain(event.text))
        found.append(fit(line, width))
    return cut(found, num_lines + 1, width)
