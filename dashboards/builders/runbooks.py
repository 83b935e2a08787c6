"""The runbook pages, from the same words as `dlc-sentinel explain`; and their list."""

from __future__ import annotations

from dashboards.builders.alerts import ALERTS, OF_SENTINEL, OF_VERDICTS, Alert

HEAD = "<!-- Made by `python -m dashboards.builders` from verdicts.py and builders/alerts.py; change those. -->\n"
BOARD_NAMES = {
    "dlc-overview": "Overview", "dlc-lag": "Lag", "dlc-engine": "Engine", "dlc-learning": "Learning",
    "dlc-health": "Sentinel health",
}  # fmt: skip


def page(alert: Alert) -> str:
    """One page, Markdown."""
    text = alert.page
    wait = "at once" if alert.for_ == "0s" else f"after {alert.for_}"
    parts = [
        f"{HEAD}# {alert.page_name}: {text.line}",
        f"Alert `{alert.name}`, severity {alert.severity}, fires {wait}. Board: DLC / {BOARD_NAMES[alert.board]} "
        f"(uid `{alert.board}`)."
        + (f" In the terminal: `dlc-sentinel explain {alert.verdict}`." if alert.verdict else ""),
        "## What it means",
        text.means,
        "## How sure it is",
        text.how_sure,
        "## What to check first",
        "\n".join(f"{number}. {line}" for number, line in enumerate(text.check_first, 1)),
        "## What to do",
        "\n".join(f"- {line}" for line in text.do),
        "## When to ignore it",
        text.ignore_when,
        "## What fires it",
        f"```\n{alert.expr}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """README.md of the folder: every page in a line."""
    lines = [f"{HEAD}# Runbooks", "One page per alert. Verdicts, worst first:", _table(OF_VERDICTS)]
    return "\n\n".join([*lines, "About the sentinel itself:", _table(OF_SENTINEL)]) + "\n"


def _table(alerts: tuple[Alert, ...]) -> str:
    rows = [f"| [{a.page_name}]({a.page_name}.md) | `{a.name}` | {a.severity} | {a.page.line} |" for a in alerts]
    return "\n".join(["| page | alert | severity | in one line |", "|---|---|---|---|", *rows])


def pages() -> dict[str, str]:
    """{file name: text}."""
    return {"README.md": index()} | {f"{alert.page_name}.md": page(alert) for alert in ALERTS}
