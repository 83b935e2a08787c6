"""The terminal view: pure from snapshot to picture (view), and the loop that shows it (live)."""
