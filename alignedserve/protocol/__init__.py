"""What crosses a process: messages, the connection to the router that carries them, handshakes, packed forms."""
