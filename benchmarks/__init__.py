"""Measuring commands: `python -m benchmarks.NAME --help`. They share harness.py, and their results are in results/."""
