"""Speed, memory and detection, each bench one module with `run() -> dict`. `python -m benchmarks` runs them all."""
