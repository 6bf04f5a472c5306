"""Communication between ranks by torch.distributed: `gloo` on CPUs, `nccl` on GPUs.

The group is built directly on a store of its own, beside torch's default group, which stays unused. `nccl` enqueues its
work on the current stream, so that CUDA graphs capture it.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import AllreduceOptions, FileStore
from torch.distributed import ProcessGroup

from alignedserve.ops.shard import Shard

# How long ranks wait for each other before they load their weights.
_SETUP_TIMEOUT = timedelta(minutes=5)
# The process that started a rank notices its end sooner.
_TIMEOUT = timedelta(minutes=5)


class TorchRanks:
    def __init__(self, store_file: Path, shard: Shard, device: torch.device) -> None:
        """Returns when all ranks have joined. They find each other by the file."""
        self._shard = shard
        store = FileStore(str(store_file), shard.size)
        store.set_timeout(_SETUP_TIMEOUT)
        self._group = ProcessGroup(store, shard.rank, shard.size)
        self._is_nccl = device.type == "cuda"
        if self._is_nccl:
            self._use_nccl(store, torch.device("cuda", torch.cuda.current_device()))
        else:
            self._use_gloo(store, device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks in float32, the same on each. `x` may be overwritten."""
        total = x.float()
        self._group.allreduce([total], AllreduceOptions()).wait()
        return total

    def sum_in_place(self, x: torch.Tensor) -> None:
        """Writes the sum over all ranks to `x`, the same on each. It is computed in x's dtype, with half the bytes."""
        self._group.allreduce([x], AllreduceOptions()).wait()

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the columns of all ranks side by side. All ranks have equally many."""
        parts = [torch.empty_like(x) for _ in range(self._shard.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=1)

    def break_up(self) -> None:
        """Ends waits for other ranks, with undefined results. `nccl` needs this because it does not notice the end
        of a process. `gloo` does, and raises."""
        if self._is_nccl:
            self._group.abort()

    def _use_gloo(self, store: FileStore, device: torch.device) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _TIMEOUT
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 1
        backend = ProcessGroupGloo(store, self._shard.rank, self._shard.size, options)
        self._group._register_backend(device, ProcessGroup.BackendType.GLOO, backend)

    def _use_nccl(self, store: FileStore, device: torch.device) -> None:
        from torch.distributed import ProcessGroupNCCL

        # By default torch ends the process when a communicator fails. Here, the instance's leader decides.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        options = ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        backend = ProcessGroupNCCL(store, self._shard.rank, self._shard.size, options)
        backend.eager_connect_single_device(device)
        self._group._register_backend(device, ProcessGroup.BackendType.NCCL, backend)
