"""How KV blocks move between processes.

There are two ways. `host`: a `Mover` copies blocks between an instance's KV cache and the pool's memory, which every
process of the host maps. `nccl`, `gloo`, `ipc`: a `KVReceiver` pulls them from the prefill instance that has staged
them, which sends them through a `KVSender`. Either way the receiver starts each transfer, the copies are made on
threads of their own, and a transfer's blocks belong to it alone until its outcome is there (`completions.py`).
"""
