"""How soon `alignedserve vopr` finds bugs: each mutant of `mutants.toml` is a line of the deciding code gone wrong."""
