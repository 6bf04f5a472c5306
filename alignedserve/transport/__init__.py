"""How KV blocks move between processes.

- `host`: a `Mover` copies blocks between an instance's KV cache and the pool's memory, which all processes of the host
  map.
- `nccl`, `gloo`, `ipc`: a `KVReceiver` pulls blocks from the prefill instance where they are staged. That instance
  sends them through a `KVSender`.

Either way, the receiver starts each transfer, and threads make the copies. The blocks of a transfer belong to it until
its outcome is known (`completions.py`).
"""
