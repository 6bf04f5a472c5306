"""Batch jobs as in OpenAI's API, and the files that they read and write."""
