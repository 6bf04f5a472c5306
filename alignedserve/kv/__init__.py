"""What blocks, columns, groups of layers, spans, formats and layouts of KV are (docs/how_it_works/kv_blocks.md)."""
