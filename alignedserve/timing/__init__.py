"""How long things take and when they are due: the cost model, its correction while it runs, deadlines. Pure."""
