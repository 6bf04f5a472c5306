"""The main figures of five papers compared with ours: the claim, our figure, how it was obtained, and a verdict.

    python -m research.papers [--quick] [--paper NAME] --out benchmarks/results

The papers are AlignedServe, ALISE, BROS, AccelGen and Apt-Serve. Each one has a file with its claims as data and the
experiments that measure them. They run in simulation, or live on this machine if they need CPU time and no GPU.
`verdict.py` defines when a claim counts as reproduced.

The papers' baselines are scheduling policies in our system, not the systems themselves. vLLM is `fcfs` on colocated
instances, DistServe is `fcfs` on separate ones, FastGen and Sarathi-Serve are `sarathi` on colocated instances.
Kernels, memory and KV swapping are the same for all, so only scheduling differs.
"""
