"""Predicts the length of answers, from the answers so far."""
