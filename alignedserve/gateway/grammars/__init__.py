"""Schemas, regexes and grammars of structured outputs, compiled before a request goes on its way."""
