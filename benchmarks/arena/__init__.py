"""Every policy in randomly drawn scenarios, and its distance from the best: see __main__.py."""
