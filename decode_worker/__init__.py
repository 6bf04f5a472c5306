"""A decode instance: the running batch, and its standing orders."""
