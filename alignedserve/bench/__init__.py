"""A load generator for any OpenAI-compatible server.

`workload.py` decides which requests are sent when, `client.py` sends them and notes when their answers come,
`results.py` computes metrics from that; `report.py` prints and saves them, `plot.py` draws them.

`compare.py` measures chat alone and beside a batch job (`best_effort.py`) on several servers, with the same parts.
"""
