"""A load generator for any OpenAI-compatible server.

`workload.py` decides what is asked when, `client.py` asks it and notes when what came back, `results.py` makes figures
of that; `report.py` prints and saves them, `plot.py` draws them.
"""
