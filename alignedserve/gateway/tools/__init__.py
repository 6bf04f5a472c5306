"""Tool calls: what a client offers, how chat templates write calls, and how text becomes calls again."""
