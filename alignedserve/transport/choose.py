"""Chooses the transport between two instances: the operator's choice, or what fits the machine.

The launch plan decides once (`launch/plan.py`). All later code gets a name from `TRANSPORTS`.
"""

from __future__ import annotations

# Chooses what fits the machine.
AUTO = "auto"
TRANSPORTS = {
    "nccl": "GPU to GPU, over NVLink where there is one",
    "gloo": "memory to memory over TCP, the same code as nccl",
    "ipc": "copies out of the other process's memory, on one host: CPU memory, or that of another or a shared GPU",
    "host": "through the pool's memory",
}


def check_link(link: str) -> None:
    """Raises ValueError if no such link exists."""
    if link not in (AUTO, *TRANSPORTS):
        raise ValueError(f"link={link!r}: must be one of {', '.join((AUTO, *TRANSPORTS))}")


def choose_transport(have_cuda: bool, same_host: bool, override: str = AUTO) -> str:
    """Returns the transport's name, or raises ValueError if `override` is impossible here. `have_cuda`: both instances
    run on GPUs. `same_host`: both map the pool's memory."""
    check_link(override)
    if override == AUTO:
        return _fitting(have_cuda, same_host)
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


def _fitting(have_cuda: bool, same_host: bool) -> str:
    if not have_cuda:
        return "host" if same_host else "gloo"
    if not same_host:
        raise ValueError("link='auto': instances on GPUs of several hosts have only nccl, on request")
    return "ipc"
