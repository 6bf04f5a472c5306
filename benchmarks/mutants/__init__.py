"""Measures how soon `alignedserve vopr` finds bugs. Each mutant in `mutants.toml` is one wrong line in the deciding
code."""
