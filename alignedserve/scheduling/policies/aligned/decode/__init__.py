"""What a decode instance does under `aligned`: `part.py` is the contents page."""
