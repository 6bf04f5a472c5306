"""What a block, a column, a group of layers, a span and a format of KV are (docs/how_it_works/kv_blocks.md)."""
