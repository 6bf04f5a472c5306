"""The cluster in virtual time: the very code that decides, with simulated instances, wires and clients around it."""
