"""Attacks on a running server, and checks that it withstands them."""
