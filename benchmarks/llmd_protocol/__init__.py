"""The public benchmark of mixed traffic, as llm-d ran it, on this machine: chats in bursts beside batch jobs.

    python -m benchmarks.llmd_protocol --out DIR [--vllm VENV/bin/python] [--quick]

guidellm itself (`make clients`) sends the chats: 90 s at one call per second, 90 s at 15, three times. They are sent
alone, and again beside three jobs of 1,000 lines with windows of 30 minutes, 2 hours and 24 hours. The results for each
system are ratios of values beside the jobs to those alone (TTFT p50 and p99, and p99 of gaps), the jobs that finished
within their windows, and the jobs' tokens per second. The systems are this server's default policy, `fcfs` and
`priority`, and with --vllm, vLLM for CPU with its priority scheduling. vLLM has no batch API, so a client keeps its
lines open.

What 15 calls per second mean depends on the machine. It is first measured how many chats per second this server answers
when it does nothing else (guidellm's `throughput`). A burst is a share of that (--burst-share), and the calm rate is a
fifteenth of the burst. Similarly, lines are so long that all three jobs would take as long as the bursts at best
effort's pace alone. Beside chats they take longer, and the page shows how many lines were left. All systems get the
same requests.

guidellm counts the mean of a call's gaps as one gap, and so do the published figures.
"""
