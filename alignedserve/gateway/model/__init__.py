"""The model as the gateway sees it, and the lengths that are predicted for its answers."""
