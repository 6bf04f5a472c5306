"""Whether the simulator can be believed: the same requests to a live colocated instance, and in simulation.

    python -m benchmarks.sim_vs_live --out benchmarks/results

For each policy and load: `alignedserve serve` with the demo model on this machine's CPU, profiled just before; a fixed
list of requests, of both classes, with objectives and arrival times, sent by an HTTP client through the gateway; then
the same requests in `alignedserve.sim`, with that profile. Loads: moderate; high; high with so few blocks that requests
are preempted (short); and all at once with as few (burst). How a burst is cut into iterations hardly depends on how
fast the processor is, or on what else it does: both sides should have about as many, also on a busy machine.

- *Where it is measured.* The simulator has the router, the pool and the instance; it has no HTTP, no tokeniser, and no
  client that shares the processor. So both sides are compared at the router's door, by the same observer of the
  router's events: from a request's coming to each of its tokens' leaving. Simulated requests come there when the live
  ones came, since the gateway gives best effort to the router a few at a time. What the client saw stands beside it.
- *Which requests count.* Others come before, on both sides: they warm the live processes up, and teach the policies of
  both what they know when those come that count. Beside quantiles, each simulated request is held against its own live
  one.
- *What the simulator is told.* The cost profile; and how much longer iterations take here than the profile says, since
  gateway, router and client use the same cores, with what an iteration takes outside the engine. The instance corrects
  its own predictions by these two (`timing/estimate.py`), and reports them; they are read off a few requests before
  those that count, so they are not fitted to what they explain. A second simulation is told the profile alone.
"""
