"""The OpenAI API in front of the islands: validates, tokenises, submits to routers, and streams the answers."""
