"""The KV pool of an island: blocks in shared host memory, and the index that batches are formed from."""
