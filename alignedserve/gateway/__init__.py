"""The HTTP APIs in front of the islands: validate, tokenise, submit to a router, stream the answer."""
