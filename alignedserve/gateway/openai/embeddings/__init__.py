"""OpenAI's embeddings, and the scores and rankings that vLLM derives from them. Nothing is generated."""
