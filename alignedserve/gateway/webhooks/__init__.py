"""Webhooks: who asked for it is told, by an HTTP request, that a batch or a response in the background has ended."""
