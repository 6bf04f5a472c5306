"""What prefill and decode instances have in common: an engine, a loop beside a connection, copies of KV."""
