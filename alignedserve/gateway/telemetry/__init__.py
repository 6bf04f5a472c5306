"""What the gateway reports about its work: request stats, metrics, traces, health."""
