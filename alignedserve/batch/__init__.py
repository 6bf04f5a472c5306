"""Batch jobs: a file of requests, each of which is answered exactly once, even if processes die."""
