"""Measures how soon `alignedserve dev vopr` finds bugs. Each mutant in `mutants.toml` is one wrong line in the deciding
code."""
