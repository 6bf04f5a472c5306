"""The OpenAI API with vLLM's additions: bodies, response builders, files, batches."""
