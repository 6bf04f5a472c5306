"""Seeds: whole systems in virtual time, where everything that can go wrong does, replayable from a number."""
