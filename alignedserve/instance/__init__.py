"""Code shared by prefill and decode instances: an engine, a loop beside a connection, copies of KV."""
