"""The page at `/`, which shows the state of the server and has a chat to try it."""
