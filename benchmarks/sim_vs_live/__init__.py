"""Validates the simulator: sends the same requests to a live colocated instance and to a simulated one.

    python -m benchmarks.sim_vs_live --out benchmarks/results

For each policy and load it runs `alignedserve serve` with the demo model on this machine's CPU, profiled just before.
An HTTP client sends a fixed list of requests through the gateway, of both classes, with objectives and arrival times.
Then `alignedserve.sim` runs the same requests with that profile. Loads are moderate; high; high with so few blocks that
requests are preempted (short); and all at once with as few blocks (burst). The division of a burst into iterations
hardly depends on the processor's speed or other load, so both sides should have similar numbers of iterations, even on
a busy machine.

- *Point of measurement.* The simulator has the router, the pool and the instance, but no HTTP, tokeniser or client on
  the same processor. So both sides are compared at the router, by the same observer of its events: from a request's
  arrival to the departure of each token. Simulated requests arrive when the live ones did, because the gateway submits
  best effort to the router gradually. The client's measurements are reported as well.
- *Counted requests.* On both sides, other requests come first. They warm up the live processes, and bring both policies
  to the same state. Besides quantiles, each simulated request is compared with its own live one.
- *Inputs of the simulator.* It gets the cost profile, and the correction for longer iterations, because gateway, router
  and client use the same cores, including the time outside the engine. The instance corrects its own predictions by
  these two values (`timing/estimate.py`) and reports them. They are taken from requests before the counted ones, so
  they are not fitted to the data. A second simulation gets only the profile.
"""
