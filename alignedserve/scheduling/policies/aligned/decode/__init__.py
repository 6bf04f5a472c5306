"""The decode instances' part of `aligned`. Start with `part.py`."""
