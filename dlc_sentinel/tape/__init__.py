"""Frames and states on disk. Knows bytes and times, not what they mean."""
