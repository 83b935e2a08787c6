"""Consumers of events and snapshots, one per file; the runtime lists those that it runs."""
