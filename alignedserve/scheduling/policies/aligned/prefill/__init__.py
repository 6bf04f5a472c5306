"""The prefill instances' part of `aligned`. Start with `part.py`."""
