"""AlignedServe's kernels, one file per kernel. To import this package imports none of them."""
