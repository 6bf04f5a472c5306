"""Anthropic's API: messages, whole and streamed, token counts, and message batches."""
