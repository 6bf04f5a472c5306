"""Commands that measure: `python -m benchmarks.NAME --help`. What they measured is in results/."""
