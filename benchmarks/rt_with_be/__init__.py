"""Measures real time (RT) beside best effort (BE): what BE costs RT, and what RT costs BE, live and in simulation.

    python -m benchmarks.rt_with_be --parts sim,bursts,goodput,exact,live,live_bursts,live_exact --out DIR

Each round measures three cases per policy, one right after the other, and every ratio is within a round: RT alone; BE
alone, with more waiting than fits; and RT with BE. In the third, RT's objectives are 1.25 times its p99 alone, unless
they are given.

- sim: the table in virtual time, for OPT-13B on an A100 by its cost model, with one and two instances of each kind
- bursts: RT in bursts (Gamma-distributed gaps, CV 5) beside best-effort jobs with windows, in virtual time
- goodput: the highest RT rate at which 90 % of RT meets its objectives while BE fills the rest, with no knowledge of
  lengths, with predicted lengths, and with exact ones
- exact: with little memory, until everything is done: computed tokens compared with needed tokens. The simulated
  gateways check every token
- live, live_bursts, live_exact: the same with `alignedserve serve` on this machine and the demo model

With --vllm-python PATH, a Python with vLLM for CPU, live and live_bursts also measure vLLM: `vllm` with its fcfs
scheduling, and `vllm-priority` with its priority scheduling, chats before lines. It has no batch API, so a client keeps
as many lines open as our router takes from a job (see `peer`).

There are two expectations of BE beside RT. (a) BE alone, minus the share of the decode instances' time that RT alone
takes. Iterations with few requests take almost as long as full ones, so this is what is left if the two never share an
iteration. (b) BE alone, minus RT's tokens, as if a token had the same cost in any iteration. (a) is the reading of
"minus the compute that RT's tokens cost" that needs no model. (b) is stricter, and a scheduler that keeps RT's
iterations short can't reach it.
"""
