"""HTTP, for any API: connections, bodies, authorisation and limits, errors, JSON written in steps."""
