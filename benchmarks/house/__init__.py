"""Measures of the code: how large it is, how its parts depend on each other, and how far a chat travels in it."""
