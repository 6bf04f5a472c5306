"""The gateway's reports: request stats, metrics, traces, health."""
