"""`dlc-sentinel` and `python -m dlc_sentinel`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""As a shell says that Ctrl-C ended a program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command line `argv` (default: this process's own)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:
        # Before numpy loads: the sentinel works on one core, and threads that wait for one another halve its speed.
        # Not for `run`: its child is the user's job.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    try:
        from dlc_sentinel.cli.app import run
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        print(
            f"dlc-sentinel: {error.name} is not installed; the commands need `pip install 'dlc-sentinel[serve]'` "
            "(the hook inside a job does not)",
            file=sys.stderr,
        )
        return 2
    return run(words)


if __name__ == "__main__":
    sys.exit(main())
