"""AlignedServe's kernels, one file per kernel. Importing this package imports none of them."""
