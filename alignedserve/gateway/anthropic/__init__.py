"""Anthropic's API: messages, whole and streamed, and counts of tokens."""
