"""The router's part of `aligned`. Start with `part.py`."""
