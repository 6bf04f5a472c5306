"""The cost model of the device at hand: what to measure, measuring it, a fit, and where it is kept."""
