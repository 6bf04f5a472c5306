"""Embeddings as OpenAI has them, and what vLLM makes of them: scores and rankings. Nothing is generated."""
