"""The OpenAI API, and what vLLM adds to it: bodies, generations, responses, files and batches."""
