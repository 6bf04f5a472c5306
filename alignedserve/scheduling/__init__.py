"""Scheduling decisions: the policies, and their views of the island and of instances. Pure."""
