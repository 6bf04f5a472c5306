"""Batch jobs: a file of requests, answered line by line, each exactly once, whatever dies meanwhile."""
