"""Runs the benches and writes bench.json, bench.png and bench.md: `python -m benchmarks [--out DIR] [NAME ...]`.

Every figure stands beside its promise as a ratio (1 = just kept, larger = better), since these machines are noisy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

Json = object


class Claim(NamedTuple):
    """One promised figure: how it reads, and measured over promised with larger = better."""

    text: str
    measured: str
    promised: str
    margin: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)}; default: all")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Mapping[str, Json]] = {}
    claims: list[Claim] = []
    for name in chosen.names or BENCHES:
        started = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = importlib.import_module(f"benchmarks.bench_{name}").run()
        if "skipped" in found[name]:
            print(f"{name}: skipped, {found[name]['skipped']}", file=sys.stderr)
            continue
        claims += BENCHES[name](found[name])
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        (chosen.out / "bench.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (chosen.out / "bench.md").write_text(page(claims), encoding="utf-8")
    draw(claims, chosen.out / "bench.png")
    print(page(claims))
    return 0


def page(claims: list[Claim]) -> str:
    """The claims as a Markdown page."""
    rows = [f"| {c.text} | {c.measured} | {c.promised} | {c.margin:.2f} |" for c in claims]
    head = [
        "# Measured",
        "",
        f"By `make bench` on {platform.machine()}, {_cpu()}, Python {platform.python_version()}. The last column is "
        "measured over promised, larger is better, 1 is just kept.",
        "",
        "| what | measured | promised | margin |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def draw(claims: list[Claim], path: Path) -> None:
    """A bar per claim on a log scale; the line at 1 is the promise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(claims) + 1.2), layout="constrained")
    at = range(len(claims))
    colours = ["#2a7f62" if c.margin >= 1 else "#b5532a" for c in claims]
    axes.barh(at, [c.margin for c in claims], color=colours)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(at, [c.text for c in claims], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("measured / promised (right of 1: kept)")
    for index, claim in enumerate(claims):
        # right of the line at 1, which would run through the words
        axes.annotate(f" {claim.measured}", (max(claim.margin, 1.0), index), va="center", fontsize=7)
    axes.margins(x=0.25)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def number(found: object, *keys: str) -> float:
    """The float at a path of keys of a bench's result."""
    for key in keys:
        assert isinstance(found, Mapping)
        found = found[key]
    assert isinstance(found, (int, float))
    return float(found)


def maths_claims(found: Mapping[str, Json]) -> list[Claim]:
    claims = []
    for name, figures in found.items():
        if isinstance(figures, Mapping) and "ratio_to_exp" in figures:
            ratio, rate = number(figures, "ratio_to_exp"), number(figures, "tokens_per_cpu_s")
            measured = f"{ratio:.3f} x np.exp ({rate / 1e6:.0f} M tokens/CPU-s)"
            claims.append(Claim(f"full statistics, {name}", measured, "0.12 x np.exp", ratio / 0.12))
    if "ratio_to_verl" in found:
        ratio = number(found, "ratio_to_verl")
        claims.append(Claim("full statistics beside verl's metrics", f"{ratio:.1f} x", "10 x", ratio / 10))
    return claims


def hook_claims(found: Mapping[str, Json]) -> list[Claim]:
    ratio, p99_us = number(found, "worst_ratio_p50"), number(found, "worst_call_p99_us")
    cpu_us = number(found, "worst_call_cpu_p99_us")
    return [
        Claim("hook, 64k tokens: median call, worst case", f"{ratio:.2f} x memcpy", "3 x memcpy", 3 / ratio),
        Claim("hook, 64k tokens: p99 call, worst case", f"{p99_us / 1e3:.2f} ms wall", "1 ms", 1e3 / p99_us),
        Claim("hook, 64k tokens: p99 of the thread's CPU", f"{cpu_us / 1e3:.2f} ms CPU", "1 ms", 1e3 / cpu_us),
    ]


def ingest_claims(found: Mapping[str, Json]) -> list[Claim]:
    claims = []
    rows = found["rows"]
    assert isinstance(rows, list)
    for row in rows:
        rate, promise = number(row, "tokens_per_cpu_s"), number(row, "promise_tokens_per_s")
        size = f"{int(number(row, 'message_tokens')) // 1024}k-token messages"
        measured = f"{rate / 1e6:.1f} M tokens/CPU-s"
        claims.append(
            Claim(f"one core, sockets and statistics, {size}", measured, f"{promise / 1e6:.0f} M", rate / promise)
        )
    return claims


def memory_claims(found: Mapping[str, Json]) -> list[Claim]:
    peak, growth = number(found, "large_peak_rss_bytes"), number(found, "growth_ratio")
    step = number(found, "large_step_bytes")
    return [
        Claim(f"peak RSS, steps of {step / 1e9:.1f} GB", f"{peak / 1e6:.0f} MB", "400 MB", 400e6 / peak),
        Claim("RSS of the last 100 of 1,000 steps", f"{growth:.3f} x the first", "1.05 x", 1.05 / growth),
    ]


def analyze_claims(found: Mapping[str, Json]) -> list[Claim]:
    claims = []
    for kind, name in (("tape", "100 M tokens of tape"), ("jsonl", "20 M tokens of .jsonl")):
        seconds, peak = number(found, kind, "full_length_s"), number(found, kind, "peak_rss_bytes")
        claims += [
            Claim(f"analyze, {name}", f"{seconds:.0f} s", "60 s", 60 / seconds),
            Claim("its peak RSS", f"{peak / 1e6:.0f} MB", "1000 MB", 1e9 / peak),
        ]
    return claims


def demo_claims(found: Mapping[str, Json]) -> list[Claim]:
    rows = found["seeds"]
    assert isinstance(rows, list)
    held, healthy, seeds = number(found, "num_saved"), number(found, "num_healthy_controls"), len(rows)
    return [
        Claim("demo: watched >= 0.9 control and >= 1.3 unwatched", f"{held:.0f} of {seeds} seeds", "4 of 5", held / 4),
        Claim("demo: control healthy", f"{healthy:.0f} of {seeds} seeds", "5 of 5", healthy / seeds),
    ]


def vllm_plugin_claims(found: Mapping[str, Json]) -> list[Claim]:
    extra_us, promised_us = number(found, "plugin_us_per_token"), number(found, "promise", "plugin_us_per_token")
    text = f"vLLM plug-in, {number(found, 'sequences_a_step'):.0f} sequences a step"
    return [Claim(text, f"{extra_us:.2f} us/token", f"{promised_us:g} us", promised_us / max(extra_us, 1e-3))]


def verl_claims(found: Mapping[str, Json]) -> list[Claim]:
    share = number(found, "thread_share_of_cpu")
    return [Claim("verl job: our thread's CPU in a step's", f"{share:.2%}", "2 %", 0.02 / share)]


def calibrated_claims(found: Mapping[str, Json]) -> list[Claim]:
    rows = found["cells"]
    assert isinstance(rows, list)
    cells = [row for row in rows if row["engine"] != "fp32"]
    rmse = max(number(row, "pool", "rmse") for row in cells)
    least = min(number(row, "pool", "coverage") for row in cells)
    return [
        Claim("calibrated ESS_32: rmse, worst cell", f"{rmse:.3f}", "0.03", 0.03 / rmse),
        Claim("its 90 % interval: coverage, worst cell", f"{least:.2f}", "0.75", least / 0.75),
    ]


def detection_claims(found: Mapping[str, Json]) -> list[Claim]:
    accuracy, alarms = number(found, "labelled", "accuracy"), number(found, "healthy", "per_1000_steps")
    steps, own = number(found, "healthy", "steps"), found["demo"]
    assert isinstance(own, Mapping)
    lead = own["rules"]["dlc-sentinel"]["median_lead_steps"] if own["rules"] else None
    return [
        Claim("verdict right, labelled runs", f"{accuracy:.1%}", "95 %", accuracy / 0.95),
        Claim(f"false alarms in {steps:.0f} healthy steps", f"{alarms:.2f} per 1000", "1", 1.0 / max(alarms, 0.01)),
        Claim("median lead before the true reward halves", f"{lead or 0:.0f} steps", "20 steps", (lead or 0) / 20),
    ]


def correction_claims(found: Mapping[str, Json]) -> list[Claim]:
    peak, promised = number(found, "peak_bytes"), number(found, "promised_bytes")
    tokens, vocab = number(found, "tokens"), number(found, "vocabulary")
    text = f"DLC loss, {tokens:,.0f} tokens, vocabulary {vocab:,.0f}: peak beyond the inputs"
    return [Claim(text, f"{peak / 1e9:.2f} GB", f"{promised / 1e9:g} GB", promised / peak)]


BENCHES: dict[str, Callable[[Mapping[str, Json]], list[Claim]]] = {
    "maths": maths_claims,
    "hook": hook_claims,
    "ingest": ingest_claims,
    "memory": memory_claims,
    "analyze": analyze_claims,
    "demo": demo_claims,
    "vllm_plugin": vllm_plugin_claims,
    "verl": verl_claims,
    "calibrated": calibrated_claims,
    "correction": correction_claims,
    "detection": detection_claims,
}
"""Each is the module `bench_<name>`, whose `run()` gives numbers, or {"skipped": why}."""

if __name__ == "__main__":
    sys.exit(main())
