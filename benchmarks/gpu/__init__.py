"""Measurements on one GPU: `python -m benchmarks.gpu.run --help`.

A part is a module with `run(bench)`. It measures cases, each through `Bench.case`, and adds rows of JSON. Its
arithmetic (bytes, FLOPs, shares) is in pure functions. Nothing here needs more packages than the engine, except `moves`
and the fit in `cost_grid`, which need msgspec, and `page`, which needs matplotlib.
"""
