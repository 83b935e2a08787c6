"""Readers of runs that are over: a tape, or JSON lines."""
