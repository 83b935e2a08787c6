"""The command: `python -m benchmarks.experiments a|b|c|d|page|all --out DIR [--seconds N]`.

Goes on where the last call stopped: a run is one line of DIR/<name>.jsonl. `page` writes DIR/claims.json,
docs/claims.md and its pictures from whatever DIR holds; `all`, the default, is everything (25 minutes of one core).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOREVER = 1e9
PARTS = ("a", "b", "c", "d")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=(*PARTS, "page", "all"), default="all")
    parser.add_argument("--out", type=Path, default=Path("bench-out/experiments"))
    parser.add_argument("--seconds", type=float, default=FOREVER)
    chosen = parser.parse_args()
    for part in PARTS:
        if chosen.part in (part, "all"):
            done = _play(part, chosen.out, chosen.seconds)
            print(f"{part}: {'all done' if done else 'more to do'}", file=sys.stderr, flush=True)
    if chosen.part in ("page", "all"):
        from benchmarks.experiments.page import write

        write(chosen.out, ROOT / "docs")
    return 0


def _play(part: str, out: Path, seconds: float) -> bool:
    if part == "c":
        from benchmarks.experiments.tiny_kl import play_c

        return play_c(out, seconds)
    from benchmarks.experiments.tabular import play_tabular

    return play_tabular(part, out, seconds)


if __name__ == "__main__":
    sys.exit(main())
