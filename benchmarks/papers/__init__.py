"""The headline figures of five papers beside ours: the claim, ours, how it was obtained, and a verdict.

    python -m benchmarks.papers [--quick] [--paper NAME] --out benchmarks/results

AlignedServe, ALISE, BROS, AccelGen and Apt-Serve. Each paper is a file that holds its claims as data, and experiments
that measure them: in simulation, or, what takes a processor's time and no GPU's, live on this machine. `verdict.py`
says when a claim counts as reproduced.

Whom the papers compare with: vLLM is `fcfs` on colocated instances, DistServe is `fcfs` apart, FastGen and
Sarathi-Serve are `sarathi` on colocated instances. Those are scheduling policies in our system, not those systems:
kernels, memory and the swapping of KV are the same for all, so that what differs is what is scheduled.
"""
