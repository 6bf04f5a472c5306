"""How long an answer will be, learned from the answers so far."""
