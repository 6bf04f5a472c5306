"""A decode instance: the running batch, and the requests that may join it or run next."""
