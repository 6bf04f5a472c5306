"""A prefill instance, which computes prompts, samples their first tokens, and saves their KV to the pool."""
