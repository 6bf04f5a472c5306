"""GGUF files: the container, and what its metadata, names and tokenizer are in a Hugging Face directory."""
