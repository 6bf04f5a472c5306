"""Batch jobs: a file of requests, answered line by line, each exactly once, whichever process dies meanwhile."""
