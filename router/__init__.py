"""Decides what runs where: the state machine in the middle of an island."""
