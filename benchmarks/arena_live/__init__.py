"""Plays scenarios drawn like the arena's on live processes, and beside each in virtual time.

    python -m benchmarks.arena_live --out benchmarks/results [--first N] [--count N] [--policies NAME ...]

A number draws the layout, lengths, load, bursts, objectives and best effort, as in `benchmarks.arena`, from values that
fit on the cores of this machine and in a minute. The model is that of `sim_vs_live`, with iterations as long as a
GPU's. Rates and objectives follow from the capacity (`benchmarks/arena/fitting.py`), by a cost profile that is measured
first, and by how much longer iterations take when the gateway, the router and the client use the same cores. Both sides
are compared at the router, with the same requests, as in `sim_vs_live`.
"""
