"""HTTP for any API: connections, bodies, authentication and limits, errors, large JSON answers."""
