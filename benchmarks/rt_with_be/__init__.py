"""Real time (RT) beside best effort (BE): what RT notices of BE, and what BE loses to RT, live and in simulation.

    python -m benchmarks.rt_with_be --parts sim,bursts,goodput,exact,live,live_bursts,live_exact --out DIR

Three cases are measured for each policy in each round, one right after the other, and every ratio is taken within a
round: RT alone; BE alone, with more of it waiting than fits; RT with BE. In the third, RT's objectives are 1.25 times
the p99 that it had alone, unless they are given.

- sim: the table in virtual time, OPT-13B on an A100 by its cost model, one and two instances of each kind;
- bursts: RT in bursts (gaps of a Gamma distribution, CV 5) beside best-effort jobs with windows, in virtual time;
- goodput: the highest RT rate of which 90 % are kept while BE fills the rest, with what is known of lengths: nothing,
  as much as the predictor knows, all;
- exact: with short memory, everything to its end: tokens computed against tokens needed; the simulation's gateways
  check every token;
- live, live_bursts, live_exact: the same with `alignedserve serve` on this machine and the demo model.

With --vllm-python PATH, a Python that has vLLM for CPU, live and live_bursts ask the same of it too: `vllm` is its
fcfs, `vllm-priority` its priority scheduling, with chats before lines. It has no batch API: a client keeps as many
lines open as our router takes of a job (see `peer`).

What BE may be expected to do beside RT is said in two ways. (a) BE alone, less the share of the decode instances' time
that RT alone takes: iterations with few requests take most of the time of full ones, so this is what is left when the
two never share an iteration. (b) BE alone, less the tokens that RT gets: as if a token cost the same in any iteration.
(a) is the reading of "minus the compute that RT's tokens cost" that needs no model; (b) is the stricter one, and no
scheduler that keeps RT's iterations short reaches it.
"""
