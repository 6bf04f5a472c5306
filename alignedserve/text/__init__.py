"""Conversion between text and token ids: tokenizer, detokenizer, chat template, stop strings."""
