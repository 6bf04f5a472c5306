"""Measuring commands: `python -m benchmarks.NAME --help`. Their results are in results/."""
