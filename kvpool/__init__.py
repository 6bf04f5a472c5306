"""The KV pool of an island: blocks in shared host memory, and the index from which batches are formed."""
