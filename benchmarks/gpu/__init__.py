"""What is measured on one GPU: `python -m benchmarks.gpu.run --help`.

A part is a module with `run(bench)`: it measures cases, each through `Bench.case`, and leaves rows of JSON. Its
arithmetic (bytes, FLOPs, what a share is of) is a pure function beside it. Nothing here needs more than the engine
does, except `moves` and the fit of `cost_grid`, which need msgspec, and `page`, which needs matplotlib.
"""
