"""The OpenAI API in front of an island: validates, tokenises, submits to the router, streams what comes back."""
