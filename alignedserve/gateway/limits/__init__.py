"""What a client may ask for, and whose turn it is when many ask at once."""
