"""A prefill instance: prompts in, first tokens out, KV into the pool."""
