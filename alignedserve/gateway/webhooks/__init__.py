"""Webhooks: HTTP requests that report the end of a batch or a background response to configured URLs."""
