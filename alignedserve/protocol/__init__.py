"""What crosses a process boundary: messages, the connection to the router that carries them, handshakes, packing."""
