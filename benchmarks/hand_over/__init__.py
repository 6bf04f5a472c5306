"""Measures the benefit of the direct hand-over, in which a decode instance pulls real time's KV from where it was
computed."""
