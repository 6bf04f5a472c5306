"""Which transport two instances use: the best that the machine has, or the one that the operator chose."""

from __future__ import annotations

TRANSPORTS = {
    "nccl": "GPU to GPU, over NVLink where there is one",
    "gloo": "memory to memory over TCP, the same code as nccl",
    "ipc": "out of the other process's memory, on one host: of a GPU, also of one that both share, or of a CPU",
    "host": "through the pool's memory",
}


def choose_transport(have_cuda: bool, same_host: bool, override: str | None = None) -> str:
    """`have_cuda`: both instances have a GPU of their own. `same_host`: both map the pool's memory."""
    if override is None:
        return _best(have_cuda, same_host)
    if override not in TRANSPORTS:
        raise ValueError(f"link={override!r}: must be one of {', '.join(TRANSPORTS)}")
    if override == "nccl" and not have_cuda:
        raise ValueError("link='nccl': both instances need a GPU; gloo and host do without")
    if override == "gloo" and have_cuda:
        raise ValueError("link='gloo': moves CPU memory only; instances on GPUs use nccl or host")
    if override == "host" and not same_host:
        raise ValueError(
            "link='host': both instances must be on the pool's host; nccl and gloo reach further"
        )
    if override == "ipc" and not same_host:
        raise ValueError("link='ipc': both instances must be on one host; nccl and gloo reach further")
    return override


def _best(have_cuda: bool, same_host: bool) -> str:
    if have_cuda:
        return "nccl"
    return "host" if same_host else "gloo"
