"""Figures of claims 1 to 4 from the rows; `figures` is what claims.json holds. Claim 5: frontier.

Tables are lists of plain dicts, an Interval as [mean, low, high].
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.experiments import frontier
from benchmarks.experiments.judge import (
    BAND,
    crossing,
    end_of,
    failure,
    failure_for_good,
    interval,
    mean_course,
    mean_ratio,
    quarters,
)  # fmt: skip
from benchmarks.experiments.store import Row, array, rows_of
from dlc_sentinel.core.facts import no_nan
from dlc_sentinel.records import Json

NEVER = ("uncorrected", "IS", "TIS", "PPO", "DLC, no resync")
WEIGHTED = ("IS", "TIS")
FACTOR, CLOSE_SHARE = 2.0, 0.1
MIN_RUNS = 4
LONG = 64
"""Responses of at least so many tokens are D's."""
RUNGS = ("1", "8", "32", "64", "inf")
PARTS = (
    "synced", "uncorrected", "resync alone", "clip alone", "centring alone", "clip + resync", "centring + resync",
    "centring + IS + resync", "DLC, no resync", "DLC",
)  # fmt: skip
GROUPS = {"A, T = 5, 6": ("A V=4", ""), "A, T = 6, noise 0.3": ("A V=4", "noise"), "D, T = 256": ("D T=256", "")}


def figures(out: Path) -> dict[str, Json]:
    """Everything the page shows, from the rows of all testbeds; JSON-ready."""
    a, b, c, d = (whole_arms(rows_of(out / f"{part}.jsonl")) for part in "abcd")
    runs = [*a, *b, *c, *d]
    found = {
        "num_runs": len(runs),
        "constant": constant(c),
        "crossing": crossings([row for row in runs if row["world"][0] in "AD"]),
        "band": band(runs),
        "trap": trap(b),
        "frontier": frontier.table([row for row in d if row["length"] >= frontier.LONG]),
        "tiny": tiny(c, [row for row in rows_of(out / "c.jsonl") if "arm" not in row]),
    }
    clean = no_nan(found)
    assert isinstance(clean, dict)
    return clean


def whole_arms(rows: Sequence[Row]) -> list[Row]:
    """Runs of arms that have all their seeds; a run that has been cut short leaves the others out."""
    runs = [row for row in rows if "arm" in row]
    num = Counter((row["world"], row["arm"]) for row in runs)
    return [row for row in runs if num[row["world"], row["arm"]] >= MIN_RUNS]


def by(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """Rows grouped by a field, in their order."""
    out: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        out[row[key]].append(row)
    return dict(out)


def constant(rows: Sequence[Row]) -> dict[str, Json]:
    """Claim 1: last quarter over first, of the discrepancy's rms and of the lag's, by arm."""
    arms = {name: of for name, of in by(rows, "arm").items() if name in (*NEVER, "synced")}
    table, holds = [], bool(arms)
    for name, of in arms.items():
        factor = {}
        for key in ("discrepancy_rms", "lag_rms"):
            ends = [quarters(row, key) for row in of]
            # a generator synced after each step has no lag to compare
            factor[key] = [last / first if first > 0 else math.nan for first, last in ends]
        is_even = all(1 / FACTOR <= value <= FACTOR for value in factor["discrepancy_rms"])
        moves = name == "synced" or all(value > FACTOR for value in factor["lag_rms"])
        holds = holds and is_even and moves
        table.append(
            {
                "arm": name, "runs": len(of), "even": is_even, "moves": moves,
                "discrepancy_factor": interval(factor["discrepancy_rms"]), "lag_factor": interval(factor["lag_rms"]),
                "discrepancy_rms": interval([quarters(row, "discrepancy_rms")[1] for row in of]),
                "lag_rms": interval([quarters(row, "lag_rms")[1] for row in of]),
            }
        )  # fmt: skip
    return {"table": table, "holds": holds}


def crossings(rows: Sequence[Row]) -> dict[str, Json]:
    """Claim 2: failure minus crossing, by response length and arm; and over all importance-weighted runs."""
    plain = [row for row in rows if row["arm"] in NEVER and "noise" not in row["world"]]
    keys = sorted({(row["length"], NEVER.index(row["arm"])) for row in plain})
    table = [
        {"length": length, "arm": NEVER[arm], **_differences(_only(plain, length, NEVER[arm]))} for length, arm in keys
    ]
    weighted = [row for row in plain if row["arm"] in WEIGHTED]
    overall = _differences(weighted)
    long = _differences([row for row in weighted if row["length"] >= LONG])
    short = _differences([row for row in weighted if row["length"] < LONG])
    share = [gap / row["num_steps"] for row in weighted if (gap := _gap(row, "1")) is not None]
    low, high = (float(np.quantile(share, q)) if share else math.nan for q in (0.25, 0.75))
    holds = low <= 0.0 <= high and low >= -CLOSE_SHARE and high <= CLOSE_SHARE
    parts = {"overall": overall, "long": long, "short": short}
    return {"table": table, **parts, "quartile_shares": [low, high], "holds": holds}


def _only(rows: Sequence[Row], length: int, arm: str) -> list[Row]:
    return [row for row in rows if row["length"] == length and row["arm"] == arm]


def _gap(row: Row, rung: str) -> int | None:
    fail, cross = failure(row), crossing(row, rung) if rung in row["ess"] else None
    return None if fail is None or cross is None else fail - cross


def _differences(rows: Sequence[Row]) -> dict[str, Json]:
    fails, crosses = [failure(row) for row in rows], [crossing(row, "1") for row in rows]
    pairs = list(zip(fails, crosses, strict=True))
    out: dict[str, Json] = {
        "runs": len(rows),
        "failed": sum(fail is not None for fail in fails),
        "failed_for_good": sum(failure_for_good(row) is not None for row in rows),
        "crossed": sum(cross is not None for cross in crosses),
        "failed_uncrossed": sum(fail is not None and cross is None for fail, cross in pairs),
        "crossed_unfailed": sum(fail is None and cross is not None for fail, cross in pairs),
        "fail_step": _quartiles([fail for fail in fails if fail is not None]),
    }
    for rung in RUNGS:
        out[f"gap_{rung}"] = _quartiles([gap for row in rows if (gap := _gap(row, rung)) is not None])
    out["gaps"] = [gap for row in rows if (gap := _gap(row, "1")) is not None]
    return out


def _quartiles(values: Sequence[float]) -> list[float]:
    """[lower quartile, median, upper quartile]; nan without values."""
    return [float(np.quantile(values, q)) if values else math.nan for q in (0.25, 0.5, 0.75)]


def band(rows: Sequence[Row]) -> dict[str, Json]:
    """Claim 3: how far the seed-mean KL ratio of DLC goes, world by world; and the parts of DLC."""
    exact = [row for row in rows if row["world"][0] in "AD"]
    arms = {world: by(of, "arm") for world, of in by(exact, "world").items()}
    worlds = [_world(world, of) for world, of in arms.items() if {"DLC", "synced", "DLC, no resync"} <= of.keys()]
    parts: dict[str, list[Json]] = {}
    for group, (start, noise) in GROUPS.items():
        of = [row for row in exact if row["world"].startswith(start) and ("noise" in row["world"]) == bool(noise)]
        parts[group] = [
            {"arm": arm, **_parts([row for row in of if row["arm"] == arm])}
            for arm in PARTS
            if any(row["arm"] == arm for row in of)
        ]
    within = sum(world["within"] for world in worlds)
    stale = sum(world["stale_within"] for world in worlds)
    held = {"within": within, "stale_within": stale, "holds": within == len(worlds) > 0}
    return {"worlds": worlds, "parts": parts, **held}


def _world(name: str, of: Mapping[str, Sequence[Row]]) -> dict[str, Json]:
    """DLC's line of one world, beside what the engine's noise alone and what no resync does."""
    own = of["DLC"]
    return {
        "world": name,
        **_band(own),
        "reverse": interval([mean_ratio(row, "reverse") for row in own]),
        "synced_largest": float(np.nanmax(mean_course(of["synced"]))),
        "stale_largest": float(np.nanmax(mean_course(of["DLC, no resync"]))),
        "stale_within": _band(of["DLC, no resync"])["within"],
    }


def _band(rows: Sequence[Row]) -> dict[str, Json]:
    course = mean_course(rows)
    return {
        "runs": len(rows),
        "mean": interval([mean_ratio(row) for row in rows]),
        "largest": float(np.nanmax(course)),
        "share_within": float(np.mean(course <= BAND)),
        "within": bool(np.all(course <= BAND)),
        "syncs": float(np.mean([len(row["syncs"]) for row in rows])),
        "end_return": interval([end_of(row, "return") for row in rows]),
    }


def _parts(rows: Sequence[Row]) -> dict[str, Json]:
    """As `_band`, over several worlds: the worst world counts for the band."""
    each = [_band(of) for of in by(rows, "world").values()]
    return {
        **_band(rows),
        "largest": max(one["largest"] for one in each),
        "share_within": float(np.mean([one["share_within"] for one in each])),
        "within": all(one["within"] for one in each),
        "worlds": len(each),
    }


def trap(rows: Sequence[Row]) -> dict[str, Json]:
    """Claim 4: the two KL ratios at the end beside what became of the return."""
    table: list[dict[str, Json]] = []
    for arm, of in by(rows, "arm").items():
        peaks = [float(np.nanmax(array(row["return"]))) for row in of]
        ends = [end_of(row, "return") for row in of]
        full, prefix = (interval([end_of(row, key) for row in of]) for key in ("ratio", "prefix"))
        lost = all(end < 0.5 * peak for end, peak in zip(ends, peaks, strict=True))
        table.append(
            {
                "arm": arm, "runs": len(of), "full": full, "prefix": prefix, "peak": interval(peaks),
                "end": interval(ends), "seen_end": interval([end_of(row, "seen_return") for row in of]),
                "seen_start": interval([array(row["seen_return"])[0] for row in of]), "lost": lost,
                "hidden": lost and prefix.mean < BAND < full.mean,
                "cross_1": _quartiles([at for row in of if (at := crossing(row, "1")) is not None]),
                "cross_inf": _quartiles([at for row in of if (at := crossing(row, "inf")) is not None]),
                "syncs": float(np.mean([len(row["syncs"]) for row in of])),
            }
        )  # fmt: skip
    of_arm = {row["arm"]: row for row in table}
    unsynced = [of_arm[arm] for arm in NEVER if arm in of_arm]
    saved = "DLC" in of_arm and not of_arm["DLC"]["lost"] and of_arm["DLC"]["full"].mean <= BAND
    hidden = [row["arm"] for row in unsynced if row["hidden"]]
    return {"table": table, "hidden": hidden, "saved": saved, "holds": saved and len(hidden) == len(unsynced) > 0}


def tiny(rows: Sequence[Row], references: Sequence[Row]) -> dict[str, Json]:
    """Testbed C, all arms: KL ratio, return, syncs."""
    table = []
    for arm, of in by(rows, "arm").items():
        fails = [fail for row in of if (fail := failure(row)) is not None]
        own = {
            "arm": arm, **_band(of), "failed": len(fails), "fail_step": _quartiles(fails),
            "prefix": interval([mean_ratio(row, "prefix") for row in of]),
            "seen_return": interval([end_of(row, "seen_return") for row in of]),
            "cross": {rung: _quartiles([at for row in of if (at := crossing(row, rung)) is not None])
                      for rung in ("1", "8", "32")},
        }  # fmt: skip
        table.append(own)
    ends = [array(row["return"])[-1] for row in references if "return" in row]
    apart = [array(row["kl"])[-1] for row in references if "kl" in row]
    return {
        "table": table,
        "on_policy": interval(ends),
        "apart": apart[0] if apart else math.nan,
        "length": _length(rows),
    }


def _length(rows: Sequence[Row]) -> int:
    return int(rows[0]["length"]) if rows else 0
