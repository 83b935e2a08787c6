"""Labelled runs with known truth: what the sentinel calls them, how soon, and how often it cries wolf.

grid (what is injected, in a file) -> streams, faults, weights, policies, courses (token streams and their damage) ->
play, labelled (one labelled run through the monitor) -> score. healthy: long runs with nothing wrong. demo_runs,
baselines: real tiny RL runs and what others would have said of them. picture, page: what `docs/detection.md` shows.
Entry: `benchmarks.bench_detection`.
"""
