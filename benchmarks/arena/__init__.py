"""Every policy in scenarios that nobody chose, and how far each is behind the best: see __main__.py."""
