"""The post-mortem as Markdown for an issue tracker: short, and with nothing in it that the tracker would obey."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dlc_sentinel.plaintext import plain, unlinked
from dlc_sentinel.records import Json
from dlc_sentinel.report import story as told
from dlc_sentinel.report.html import advice, cards, compared
from dlc_sentinel.report.story import Story, word
from dlc_sentinel.verdicts import text_of

MAX_FINDINGS = 8
MAX_SENT = 12
MAX_EVENTS = 30
_SIGNS = re.compile(r"([\\`*_\[\]|~$&])")


def text(story: Story, other: Story | None = None) -> str:
    """The whole text. Every word from outside is made inert: no markup, no mention, no link."""
    lines = [f"## Post-mortem of {inert(story.run)}: {inert(story.verdict.name)}", ""]
    lines += [f"{inert(story.line)}.", "", f"**Do:** {inert(advice(story))}", ""]
    head = [story.model_name, told.when(story), f"read from {story.source}", f"dlc-sentinel {story.version}"]
    lines += [", ".join(inert(part) for part in head if part), ""]
    if other is not None:
        lines += [f"| | {inert(story.run)} | {inert(other.run)} |", "|---|---|---|"]
        lines += [f"| {inert(a)} | {inert(b)} | {inert(c)} |" for a, b, c in compared(story, other)]
        lines.append("")
    lines += ["| | |", "|---|---|"]
    lines += [f"| {inert(name)} | {inert(value)} ({inert(remark)}) |" for name, value, remark in cards(story)]
    lines += ["", "### Findings", ""]
    lines += [_finding(same) for same in told.alike(story)[:MAX_FINDINGS]] or ["None was opened."]
    lines += ["", "### What was sent, and what it did", "", *_sent(story), "", "### Timeline", ""]
    lines += [
        f"* {f'{at} ' if at else ''}{f'step {step} ' if step else ''}**{inert(kind)}** {inert(what)}"
        for at, step, _, kind, what in told.timeline(story, MAX_EVENTS)
    ] or ["Nothing to tell."]
    lines += ["", "### Worst tokens", "", *_worst(story), ""]
    lines += [f"Basis of the split: {inert(told.bases(story))}. Dropped: {inert(_dropped(story))}."]
    return "\n".join(lines) + "\n"


def inert(value: object) -> str:
    """One line in which no sign means anything to a Markdown renderer."""
    return _SIGNS.sub(r"\\\1", unlinked(plain(value, 400)))


def _finding(same: Sequence[Mapping[str, Json]]) -> str:
    finding, more = same[0], told.opened(same[1:])
    kind = f" ({inert(finding['kind'])})" if finding["kind"] else ""
    evidence = finding["evidence"] if isinstance(finding["evidence"], Mapping) else {}
    shown = ", ".join(f"{inert(key)} {inert(word(value))}" for key, value in list(evidence.items())[:8])
    name = plain(finding["verdict"], 24)
    return (
        f"* **{inert(name)}**{kind}, {inert(finding['state'])}, since step {inert(word(finding['since_step']))}: "
        f"{inert(text_of(name).line)}" + (f"; {shown}" if shown else "") + (f"; {more}" if more else "")
    )


def _sent(story: Story) -> list[str]:
    commands = told.sent(story)
    if not commands:
        return ["No command was due."]
    rows = ["| step | command | why | answer | ESS before | best of the next 5 |", "|---|---|---|---|---|---|"]
    for each in commands[:MAX_SENT]:
        cells = (each.step, f"{each.kind} {each.action}".strip(), each.reason, each.outcome, word(each.ess_before),
                 word(each.ess_after))  # fmt: skip
        rows.append(f"| {' | '.join(inert(cell) for cell in cells)} |")
    return rows + ([f"\n{len(commands) - MAX_SENT} more."] if len(commands) > MAX_SENT else [])


def _worst(story: Story) -> list[str]:
    from_strips = [
        f"* step {strip['step']}, sequence {inert(strip['id'])}, token {strip['at']}: {word(strip['score'])} nats"
        for strip in story.evidence.worst[:5]
    ]
    return from_strips or ["The recording holds no tokens."]


def _dropped(story: Story) -> str:
    return ", ".join(f"{cause} {num}" for cause, num in told.dropped(story)) or "none"
