"""What the router does under `aligned`: `part.py` is the contents page."""
