"""What a client may ask for, and turns among clients that ask at the same time."""
