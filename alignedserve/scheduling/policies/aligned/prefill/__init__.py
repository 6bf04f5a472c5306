"""What a prefill instance does under `aligned`: `part.py` is the contents page."""
