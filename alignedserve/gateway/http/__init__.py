"""HTTP, for any API: connections, bodies, who may send requests and how much, errors, JSON written in steps."""
