"""A call, whichever API it comes by: from its body to prompts, from prompts to tokens, from tokens to an answer."""
