"""Durations and due times: the cost model, its correction at run time, deadlines. Pure."""
