"""`dlc-sentinel` and `python -m dlc_sentinel`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command line `argv` (default: this process's own)."""
    try:
        from dlc_sentinel.cli.app import run
    except ModuleNotFoundError as error:
        print(
            f"dlc-sentinel: {error.name} is not installed; the commands need `pip install 'dlc-sentinel[serve]'` "
            "(the hook inside a job does not)",
            file=sys.stderr,
        )
        return 2
    return run(list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
