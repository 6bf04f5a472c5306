"""Searches for failures by seed: whole systems in virtual time, with every kind of fault, replayable from a number."""
