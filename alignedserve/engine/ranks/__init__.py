"""One instance in several processes, each with some of the model's heads: one leads, the others follow."""
