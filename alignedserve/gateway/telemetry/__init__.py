"""What the gateway lets be known of its work: request stats, metrics, traces, health."""
