"""The whole system in virtual time: the real code runs, and only time, network and disk are simulated."""
