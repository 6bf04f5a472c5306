"""Quantised checkpoints: a file for each layout of tensors, and the reading of a layer in any of them."""
