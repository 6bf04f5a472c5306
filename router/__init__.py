"""Decides what runs where: the state machine at the centre of an island."""
