"""The bytes of KV blocks, on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from alignedserve.protocol.kv_format import BlockFormat


class KVCache:
    def __init__(
        self,
        form: BlockFormat,
        num_blocks: int,
        device: torch.device,
        allocate: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        self.format = form
        # The blocks are not cleared: nothing reads a slot before it is written. On a CPU, pages cost nothing until
        # then.
        self.blocks = allocate(
            (num_blocks, *form.shape), dtype=getattr(torch, form.torch_dtype), device=device
        )
