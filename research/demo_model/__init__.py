"""Trains and evaluates the demo model, which is in `alignedserve/demo`."""
