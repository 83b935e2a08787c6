"""The post-mortem as one HTML file: no script, nothing loaded, light and dark, every text from outside escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dlc_sentinel.catalog import number
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json
from dlc_sentinel.report import figure, strips
from dlc_sentinel.report import story as told
from dlc_sentinel.report.story import Story, word
from dlc_sentinel.verdicts import VerdictText, asked, text_of

MAX_TABLE_STEPS = 160
MAX_FINDINGS = 24
MAX_SENT = 200
_FOLDER = Path(__file__).parent


def page(story: Story, other: Story | None = None) -> str:
    """The whole file as text. With `other`: the two runs side by side first, then the first run in full."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_inert,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        style=Markup(style()),
        story=story,
        title=f"{plain(story.run, 60)}" + (f" against {plain(other.run, 60)}" if other else ""),
        other=other,
        compared=compared(story, other) if other else (),
        pair=_svg(figure.two(story, other), figure.two(story, other, figure.NARROW)) if other else None,
        main=_svg(figure.one(story), figure.one(story, figure.NARROW)),
        **_parts(story),
    )


def _inert(value: object) -> object:
    """What the template writes: escaped by jinja, and here freed of what a terminal or an editor would obey."""
    return value if isinstance(value, Markup) else plain(value, 600)


def style() -> str:
    """The style sheet of page and picture."""
    return (_FOLDER / "style.css").read_text(encoding="utf-8")


def picture_page(svg: str, *, dark: bool = False) -> str:
    """A bare page that holds one figure: what a browser makes a PNG of."""
    theme = "dark" if dark else "light"
    return (
        f'<!doctype html><html class="{theme}"><meta charset="utf-8"><style>{style()} body{{margin:0;padding:12px}}'
        f"</style><body>{svg}</body></html>"
    )


def _parts(story: Story) -> Mapping[str, Json]:
    return {
        "mark": "ok" if story.verdict.name == "HEALTHY" else "unknown" if not story.verdict.is_known else "bad",
        "when": told.when(story),
        "advice": advice(story),
        "cards": cards(story),
        "findings": [_finding(story, same[0], same[1:]) for same in told.alike(story)[:MAX_FINDINGS]],
        "num_findings": len(told.alike(story)),
        "sent": told.sent(story)[:MAX_SENT],
        "num_sent": len(told.sent(story)),
        "timeline": list(told.timeline(story)),
        "worst": [_strip(data) for data in story.evidence.worst],
        "steps": _table(story),
        "num_steps": len(story.steps),
        "dropped": told.dropped(story),
        "bases": told.bases(story),
        "about": [_about(who) for who in story.evidence.about],
        "synced": _synced(story),
        "word": word,
    }


def _svg(wide: str, narrow: str) -> Mapping[str, Markup] | None:
    """Both widths of a picture that our own code wrote: each of its texts is escaped there."""
    return {"wide": Markup(wide), "narrow": Markup(narrow)} if wide else None


def _strip(data: Mapping[str, Json]) -> Mapping[str, Json]:
    shown = strips.strip(data)
    return {"title": shown.title, "facts": shown.facts, "svg": _svg(shown.wide, shown.narrow)}


def advice(story: Story) -> str:
    """What to do first: the advice of the finding behind the verdict, else the verdict's own."""
    same = (f for f in story.report["findings"] if f["verdict"] == story.verdict.name)
    return plain((next(same, None) or {}).get("advice") or story.verdict.do[0], 400)


def cards(story: Story) -> list[tuple[str, str, str]]:
    """(name, number, remark): the figures a reader looks for first."""
    own = str(story.horizon)
    ess, ess_at = told.least(story, "lag_ess", own)
    lag, lag_at = told.most(story, "lag", "rms")
    discrepancy, at = told.most(story, "discrepancy", "rms")
    floor = number(story.steps[-1] if story.steps else None, "floor", "rms")
    commands = told.sent(story)
    applied = sum(each.outcome == "applied" for each in commands)
    lost = sum(num for _, num in told.dropped(story))
    used = sum(int(step["num_tokens"] or 0) for step in story.steps)
    steps = f"{story.steps[0]['step']} to {story.steps[-1]['step']}" if story.steps else "none closed"
    return [
        ("steps", word(len(story.steps)), steps),
        (f"least ESS, h* = {own}", word(ess), f"step {ess_at}; RESYNC below 1/2" if ess_at >= 0 else "not known"),
        ("largest lag, rms", word(lag), f"nats per token, step {lag_at}" if lag_at >= 0 else "not known"),
        ("largest discrepancy, rms", word(discrepancy), f"step {at}; floor {word(floor)}" if at >= 0 else "not known"),
        ("commands", word(len(commands)), f"{applied} applied" if commands else "none was due"),
        ("tokens used", word(used), f"{word(lost)} dropped"),
    ]


def compared(first: Story, second: Story) -> list[tuple[str, str, str]]:
    """(what, first run, second run): the figures of both, and the settings in which they differ."""
    rows = [("verdict", first.verdict.name, second.verdict.name), ("read from", first.source, second.source)]
    rows += [
        (name, f"{a} ({remark_a})", f"{b} ({remark_b})")
        for (name, a, remark_a), (_, b, remark_b) in zip(cards(first), cards(second), strict=True)
    ]
    for label, keys in (("median ESS, h*", ("lag_ess", str(first.horizon))), ("median lag, rms", ("lag", "rms")),
                        ("median discrepancy, rms", ("discrepancy", "rms")),
                        ("median KL per trajectory", ("kl", "gen_now_full"))):  # fmt: skip
        rows.append((label, word(_median(first, keys)), word(_median(second, keys))))
    mine, theirs = ({key: value for key, value, _ in each.settings} for each in (first, second))
    rows += [(key, value, theirs[key]) for key, value in mine.items() if theirs.get(key, value) != value]
    return [(plain(a, 80), plain(b, 200), plain(c, 200)) for a, b, c in rows]


def _median(story: Story, keys: Sequence[str]) -> float:
    values = sorted(value for _, value in told.curve(story, *keys) if math.isfinite(value))
    if not values:
        return math.nan
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2.0


def _finding(story: Story, finding: Mapping[str, Json], others: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
    text: VerdictText = text_of(plain(finding["verdict"], 24))
    confidence = number(finding, "confidence")
    state = plain(finding["state"], 20)
    facts = [state, f"since step {word(finding['since_step'])}"]
    facts += [f"{100 * confidence:.0f} % sure"] if math.isfinite(confidence) else []
    facts += ["catastrophic"] if finding["catastrophic"] else []
    facts += [what] if (what := asked(finding, hypothetical=not story.has_clock)) else []
    evidence = finding["evidence"] if isinstance(finding["evidence"], Mapping) else {}
    return {
        "name": plain(finding["verdict"], 24),
        "kind": plain(finding["kind"] or "", 40),
        "facts": ", ".join(facts),
        "others": told.opened(others),
        "is_open": state in ("suspected", "confirmed"),
        "advice": plain(finding["advice"] or text.do[0], 400),
        "evidence": [(plain(key, 60), word(value)) for key, value in evidence.items()],
        "text": text,
    }


def _table(story: Story) -> list[list[str]]:
    """One row a step; of a long run every n-th, and always those where the ESS was below one half."""
    own = str(story.horizon)
    every = math.ceil(len(story.steps) / MAX_TABLE_STEPS)
    low = [i for i, step in enumerate(story.steps) if number(step, "lag_ess", own) < 0.5][:MAX_TABLE_STEPS]
    shown = sorted({*range(0, len(story.steps), max(every, 1)), *low})
    return [_cells(story.steps[i], own) for i in shown]


def _cells(step: Mapping[str, Json], own: str) -> list[str]:
    numbers = (
        number(step, "version_age", "mean"), number(step, "lag_ess", own), number(step, "lag_ess", "1"),
        number(step, "lag", "rms"), number(step, "discrepancy", "rms"), number(step, "total", "p99_abs"),
        number(step, "kl", "gen_now_full"),
    )  # fmt: skip
    lost = sum(int(num or 0) for num in step["dropped"].values())
    head = [word(step["step"]), word(step["version"]), plain(step["basis"], 12), word(step["num_tokens"])]
    return [*head, *(word(value) for value in numbers), word(lost)]


def _about(who: Mapping[str, Json]) -> Mapping[str, str]:
    def listed(name: str) -> str:
        return ", ".join(f"{plain(k, 40)} {plain(v, 60)}" for k, v in who[name].items()) or "not said"

    place = f"replica {plain(who['replica'], 40)}" if who["role"] == "engine" else f"rank {who['rank']}"
    return {
        "name": f"{plain(who['role'], 12)} {place}",
        "where": f"pid {who['pid']} on {plain(who['host'], 60) or 'unknown host'}",
        "stack": plain(who["stack"], 60) or "not said",
        "versions": listed("versions"),
        "dtypes": listed("dtypes"),
        "sampling": listed("sampling"),
    }


def _synced(story: Story) -> str:
    synced = story.evidence.synced
    if not synced:
        return "no delivery of weights was reported"
    steps = [str(row["step"]) for row in synced]
    shown = ", ".join(steps if len(steps) <= 24 else [*steps[:20], "...", *steps[-3:]])
    last = word(synced[-1]["version"])
    return f"weights delivered {len(synced)} times, at steps {shown}; the last one is version {last}"
