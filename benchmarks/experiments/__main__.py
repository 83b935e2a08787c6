"""The command: `python -m benchmarks.experiments a|b|c|d|page --out DIR [--seconds N]`.

Goes on where the last call stopped: a run is one line of DIR/<name>.jsonl. `page` writes DIR/claims.json,
docs/claims.md and its pictures from whatever DIR holds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOREVER = 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("a", "b", "c", "d", "page"))
    parser.add_argument("--out", type=Path, default=Path("bench-out/experiments"))
    parser.add_argument("--seconds", type=float, default=FOREVER)
    chosen = parser.parse_args()
    if chosen.part == "page":
        from benchmarks.experiments.page import write

        write(chosen.out, ROOT / "docs")
        return 0
    if chosen.part == "c":
        from benchmarks.experiments.tiny_kl import play_c

        done = play_c(chosen.out, chosen.seconds)
    else:
        from benchmarks.experiments.tabular import play_tabular

        done = play_tabular(chosen.part, chosen.out, chosen.seconds)
    print(f"{chosen.part}: {'all done' if done else 'more to do'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
