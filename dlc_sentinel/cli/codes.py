"""Exit codes that scripts may rely on; those of `analyze` and `replay` are in offline/analyze.py."""

from __future__ import annotations

OK = 0
DEGRADED = 1
"""The answer is that something is missing: no sentinel there, nothing judged, a failed check."""
USAGE = 2
"""The command, an option, the configuration or an address is not usable as given."""
NOT_EXECUTABLE = 126
NOT_FOUND = 127
"""CMD of `run -- CMD` could not be started, as shells say it."""
INTERNAL = 70
"""A fault of ours."""
