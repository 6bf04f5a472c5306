"""Runs histories on an island or a whole system, searches for one that fails, and shrinks it."""
