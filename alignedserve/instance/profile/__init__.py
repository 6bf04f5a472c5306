"""The cost model of the device at hand: what to measure, how, a fit, and where the profile is kept."""
