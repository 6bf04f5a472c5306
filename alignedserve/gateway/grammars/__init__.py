"""Compiles the schemas, regexes and grammars of structured outputs before a request is submitted."""
