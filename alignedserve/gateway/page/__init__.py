"""The page at `/`: it shows what the server does, and lets one try it."""
