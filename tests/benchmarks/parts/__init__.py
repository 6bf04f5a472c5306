"""Parts of `benchmarks.gpu.first` for its tests. Each runs in its own process, like the parts that measure
something."""
