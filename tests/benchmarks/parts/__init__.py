"""Parts of `benchmarks.gpu.first` that tests of it run: each is a process, as those are that measure something."""
