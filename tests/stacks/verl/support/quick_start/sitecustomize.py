"""Runs first in every Python process of a test job: where `warm` is there, drivers and workers are its forks."""

import os
import sys

_warm = os.environ.get("VERL_CPU_WARM")
if _warm:
    _what = next((arg for arg in sys.orig_argv[1:] if arg == "-m" or not arg.startswith("-")), "")
    if _what.endswith(("/default_worker.py", "/make_model.py")) or _what == "-m":
        import stand_in

        stand_in.run(_warm)
