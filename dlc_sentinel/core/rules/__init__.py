"""One module per verdict: (history, view) -> what the newest step points at."""
