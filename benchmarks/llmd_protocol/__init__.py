"""The public benchmark of mixed traffic, as llm-d ran it, on this machine: chats in bursts beside batch jobs.

    python -m benchmarks.llmd_protocol --out DIR [--vllm VENV/bin/python] [--quick]

Chats come from guidellm itself (`make clients`): 90 s at one call a second, 90 s at 15, three times. They are asked
alone, and again beside three jobs of 1,000 lines with windows of 30 minutes, 2 hours and 24 hours. Said of each
system: the ratios of TTFT p50 and p99 and of gaps' p99 beside the jobs to those alone, jobs that were done within their
windows, and tokens of the jobs per second. Systems are this server's default policy, `fcfs` and `priority`, and, with
--vllm, vLLM for CPU with its priority scheduling, for which a client keeps lines open, since it has no batch API.

What 15 calls a second are depends on the machine: it is measured first, how many chats a second this server answers
with nothing else to do (`throughput` of guidellm), and a burst is a share of that (--burst-share), the calm a fifteenth
of the burst. Likewise lines are so long that all three jobs together would take as long as the bursts do, at the pace
that best effort has alone: beside chats they last longer, and the page says how many lines were left. All systems are
asked the same.

guidellm counts a gap as the mean of a call's gaps; so do the published figures.
"""
