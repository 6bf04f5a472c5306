"""The page at `/`: it shows what the server does, and lets a user try it."""
