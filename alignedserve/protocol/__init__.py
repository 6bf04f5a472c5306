"""Everything that crosses a process boundary: messages, the connection to the router, handshakes and frames."""
