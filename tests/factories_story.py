"""Stories for post-mortems: made of the file format's objects; each test names only what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from factories_snapshots import NOW_S, make_event, make_finding, make_step

from dlc_sentinel.evidence import RunEvidence
from dlc_sentinel.report.story import Story

COVERED_TEXTS = """
(() => {
  const boxes = [...document.querySelectorAll('svg text')]
    .filter(node => node.textContent.trim() && node.checkVisibility())
    .map(node => [node.textContent, node.getBoundingClientRect(), node.ownerSVGElement.getBoundingClientRect()]);
  const found = boxes.filter(([, box, svg]) => box.left < svg.left - 1 || box.right > svg.right + 1
    || box.top < svg.top - 1 || box.bottom > svg.bottom + 1).map(([text]) => `cut off: ${text}`);
  boxes.forEach(([text, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (width > 1 && height > 4) found.push(`${text} covers ${other}`);
  }));
  return found;
})()
"""
"""JavaScript: the texts of the pictures in a page that are cut off, or that cover one another."""


def make_strip(**changes: Any) -> dict[str, Any]:
    strip: dict[str, Any] = {
        "step": 33, "update": 0, "id": "s1", "group": "g1", "replica": "0", "version": 30, "trainer_version": 33,
        "length": 5, "first": 0, "at": 2, "score": 3.5, "engine": [-0.1, -0.2, -4.0, -0.3, None],
        "gen": [-0.1, -0.2, -3.9, -0.3, -0.1], "cur": [-0.1, -0.3, -0.5, -0.3, -0.1], "tokens": [5, 6, 7, 8, 9],
        "mask": [1, 1, 1, 0, 1],
    }  # fmt: skip
    return strip | changes


def make_story(num_steps: int = 40, **changes: Any) -> Story:
    """A run whose ESS falls below one half at step 31 and is whole again from step 35 on."""
    steps = [make_step(n, lag_ess={"32": 0.43 if 31 <= n < 35 else 0.968}) for n in range(num_steps)]
    command = {"id": "c-1", "kind": "RESYNC", "action": "sync_weights", "reason": "lag ESS 0.43", "sent": True}
    events = (
        make_event("finding", step=32, text="LAG queue confirmed since step 31", data=make_finding()),
        make_event("command", step=33, t_s=NOW_S + 10, text="RESYNC sync_weights", data=command),
        make_event("ack", step=34, t_s=NOW_S + 20, level="INFO", text="c-1: applied at version 35",
                   data={"id": "c-1", "outcome": "applied", "version": 35}),
        make_event("finding", step=38, t_s=NOW_S + 30, level="INFO", text="LAG queue closed",
                   data=make_finding(state="closed")),
    )  # fmt: skip
    about = {
        "role": "trainer", "rank": 0, "replica": "0", "host": "node-1", "pid": 7, "model_name": "Qwen3-0.6B",
        "stack": "verl", "versions": {"torch": "2.13.0"}, "dtypes": {"trainer": "bfloat16"},
        "sampling": {"temperature": "1.0"},
    }  # fmt: skip
    story = Story(
        source="runs/today", run="r1",
        report={"verdict": "LAG", "findings": [make_finding(state="closed", acted=True)], "steps": steps,
                "commands": [], "unparsed_lines": []},
        events=events,
        evidence=RunEvidence(
            worst=(make_strip(),), scalars=tuple({"step": n, "reward": n / 100} for n in range(num_steps)),
            synced=({"step": 34, "version": 35, "checksum": "ab", "label": "", "replica": "0"},), about=(about,),
        ),
        settings=[("ess.horizon", "32", "default"), ("act.mode", "resync", "--act")], version="0.1.0",
    )  # fmt: skip
    return replace(story, **changes)
