"""A call of any API: from body to prompts, from prompts to tokens, from tokens to an answer."""
