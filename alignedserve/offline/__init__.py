"""A colocated instance in the caller's own process, without a router or anything else of the cluster."""
