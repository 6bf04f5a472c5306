"""Schemas, regexes and grammars of structured outputs, which are compiled before a request is submitted."""
