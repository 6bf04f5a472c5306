"""The cost model of this device: what to measure, how, a fit, and where the profile is stored."""
