"""Measures decode attention alone: bytes of KV per second, as a share of what a copy reaches on this GPU.

There are six mixes of lengths (the skewed ones are HPC-Ops's), with 8 KV heads of size 128 and 32 query heads. Both of
our kernels are compared with torch's FlashAttention over packed KV, torch's SDPA where all lengths are equal, and a
plain copy of as many bytes, which shows what a mix of few bytes can reach. Calls follow each other in a CUDA graph, as
in a step. Each uses another layer's KV, so none finds its bytes in the cache. Targets: 85% at 64 x 4K, 75% at the
others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from alignedserve.ops.cuda_attention import flash_attention
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import ceiling
from benchmarks.gpu.record import Row
from benchmarks.gpu.timing import device_seconds

MIXES = {
    "64 x 4K": [4096] * 64,
    "32 x 128 + 32 x 4K": [128] * 32 + [4096] * 32,
    "2 x 32K + 30 x 4K": [32768] * 2 + [4096] * 30,
    "1 x 64K + 15 x 4K": [65536] + [4096] * 15,
    "1 x 128K + 31 x 4K": [131072] + [4096] * 31,
    "8 x 1K": [1024] * 8,
    "1 x 1K": [1024],
    "128 x 512": [512] * 128,
}
# Sequences, tokens that they have in common, and tokens of their own.
SHARED = (64, 4096, 128)
AIM_EVEN, AIM_SKEWED = 0.85, 0.75
BLOCK_SIZE = 16
# Bytes of all layers together: several times the size of the cache.
MIN_BYTES = 600 << 20
MAX_LAYERS = 24
REPEATS = 15


def kv_bytes(lengths: Sequence[int], num_kv_heads: int, head_dim: int, value_bytes: int = 2) -> int:
    """Returns the bytes of one layer's keys and values."""
    return sum(lengths) * num_kv_heads * head_dim * 2 * value_bytes


def num_layers(num_bytes: int, max_layers: int = MAX_LAYERS) -> int:
    return max(2, min(max_layers, -(-MIN_BYTES // num_bytes)))


def num_unique(lengths: Sequence[int], num_common: int) -> int:
    """Returns the tokens of sequences whose first `num_common` are the same."""
    return num_common + sum(length - num_common for length in lengths)


def run(bench: Bench) -> None:
    for mix, lengths in MIXES.items():
        if bench.options.is_tiny:
            lengths = [max(1, length // 256) for length in lengths[-3:]]
        bench.case(mix, measure_mix, bench, mix, lengths, needs_s=8.0)
    # Last, because a kernel that fails can leave the GPU unusable to this process. Three kernels are compiled.
    bench.case("64 behind 4,096 common tokens", measure_shared, bench, needs_s=15.0)


def measure_mix(bench: Bench, mix: str, lengths: list[int]) -> Row:
    heads = (32, 8, 128) if not bench.options.is_tiny else (4, 2, 64)
    max_layers = bench.pick(MAX_LAYERS, 2)
    state = Inputs(bench.device, lengths, *heads, max_layers=max_layers)
    num_bytes = kv_bytes(lengths, heads[1], heads[2], state.cache.element_size())
    copied_per_s = ceiling(bench, "copy_bytes_per_s")
    aim = AIM_EVEN if mix == "64 x 4K" else AIM_SKEWED
    shares = {}
    for kernel, calls in state.kernels().items():
        seconds = statistics.median(chained_seconds(bench, calls))
        shares[kernel] = num_bytes / seconds / copied_per_s
        bench.record.add(
            {
                "part": "attention",
                "case": f"{mix}: {kernel}",
                "mix": mix,
                "kernel": kernel,
                "num_bytes": num_bytes,
                "median_s": seconds,
                "share": shares[kernel],
                "summary": f"{seconds * 1e6:8.1f} us {shares[kernel]:6.1%}",
            }
        )
    return {
        "error_of_balanced": state.error(),
        "aim": aim,
        "summary": f"balanced {shares['balanced']:.1%} (aim {aim:.0%}), error {state.error():.1e}",
    }


def measure_shared(bench: Bench) -> Row:
    """Compares `balanced`, in which each sequence reads all of its keys, with `shared`."""
    num_seqs, num_common, num_own = SHARED if not bench.options.is_tiny else (3, 512, 9)
    heads = (32, 8, 128) if not bench.options.is_tiny else (4, 2, 64)
    lengths = [num_common + num_own] * num_seqs
    state = Inputs(bench.device, lengths, *heads, max_layers=bench.pick(MAX_LAYERS, 2), num_common=num_common)
    num_tokens = num_unique(lengths, num_common)
    num_bytes = kv_bytes([num_tokens], heads[1], heads[2], state.cache.element_size())
    alone_s = statistics.median(chained_seconds(bench, state.balanced_calls()))
    token_bytes = kv_bytes([1], heads[1], heads[2], state.cache.element_size())
    # Tiny sequences save too little.
    shared_calls = state.shared_calls(token_bytes if not bench.options.is_tiny else 1 << 20)
    shared_s = statistics.median(chained_seconds(bench, shared_calls))
    error = state.error(shared_calls[0])
    return {
        "num_bytes": num_bytes,
        "num_layers": state.layers,
        "alone_s": alone_s,
        "shared_s": shared_s,
        "copied_share": num_bytes / shared_s / ceiling(bench, "copy_bytes_per_s"),
        "error_of_shared": error,
        "summary": f"balanced {alone_s * 1e6:.1f} us, shared {shared_s * 1e6:.1f} us, error {error:.1e}",
    }


def chained_seconds(bench: Bench, calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Returns the seconds per call, measured over all calls one after the other in a graph."""
    for call in calls[:2]:
        call()
    bench.synchronize()
    if not bench.is_cuda:
        # On a CPU this only tries the script out, so one repeat is enough.
        once = device_seconds(bench, lambda: [call() for call in calls], repeats=1, warm_ups=0)
        return [seconds / len(calls) for seconds in once]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [seconds / len(calls) for seconds in device_seconds(bench, graph.replay, REPEATS)]


class Inputs:
    """Sequences with blocks scattered over a cache of several layers."""

    def __init__(
        self,
        device: torch.device,
        lengths: list[int],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_layers: int = MAX_LAYERS,
        num_common: int = 0,
    ) -> None:
        """`num_common`: leading tokens that all sequences have in common, in whole blocks."""
        from alignedserve.kernels.triton.decode_attention import DecodeScratch, decode_tuning
        from alignedserve.kernels.triton.paged_attention import PagedStep

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.lengths, self.scale = lengths, head_dim**-0.5
        num_bytes = kv_bytes([num_unique(lengths, num_common)], num_kv_heads, head_dim)
        self.layers = num_layers(num_bytes, max_layers)
        first_own = num_common // BLOCK_SIZE
        num_blocks = [first_own, *(-(-length // BLOCK_SIZE) - first_own for length in lengths)]
        shape = (sum(num_blocks), self.layers, 2, num_kv_heads, BLOCK_SIZE, head_dim)
        self.cache = torch.empty(shape, dtype=dtype, device=device)
        for block in torch.split(self.cache, 1024):
            block.normal_(0.0, 0.5)
        common, *ids = torch.split(torch.randperm(sum(num_blocks)).int(), num_blocks)
        table = torch.zeros(len(lengths), first_own + max(map(len, ids)), dtype=torch.int32)
        table[:, :first_own] = common
        for row, own in zip(table, ids, strict=True):
            row[first_own : first_own + len(own)] = own
        self._host_table = table.numpy()

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.step = PagedStep(
            query_start=ints(range(len(lengths) + 1)),
            context_len=ints(lengths),
            block_table=table.to(device),
            table_stride=ints([table.shape[1]]),
            num_seqs=len(lengths),
        )
        self.q = torch.randn(len(lengths), num_heads, head_dim, device=device).to(dtype)
        self.out = torch.empty_like(self.q)
        self.tuning = decode_tuning(num_heads // num_kv_heads, head_dim, self.cache.element_size())
        self._num_sms = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        )
        self.scratch = DecodeScratch(
            num_heads, num_kv_heads, head_dim, len(lengths), self._num_sms, device, self.tuning
        )
        self.plan = self.scratch.new_plan()
        self.scratch.make_plan(self.plan, self.step, num_kv_heads, None)

    def balanced_calls(self) -> list[Callable[[], Any]]:
        return [partial(self._balanced, layer) for layer in range(self.layers)]

    def kernels(self) -> dict[str, list[Callable[[], Any]]]:
        """Returns each kernel's calls, one per layer, all computing the same attention."""
        layers = range(self.layers)
        found: dict[str, list[Callable[[], Any]]] = {
            "balanced": self.balanced_calls(),
            "plain": [partial(self._plain, layer) for layer in layers],
        }
        if self.q.is_cuda:
            found["torch varlen"] = self._varlen()
            if len(set(self.lengths)) == 1:
                found["torch SDPA"] = self._sdpa()
            found["copy"] = self._copies()
        return found

    def shared_calls(self, token_bytes: int) -> list[Callable[[], Any]]:
        """Returns calls like those of `balanced`, which read common keys once. Makes their plans. `token_bytes`: of K
        and V, by which the plan judges whether reading once pays."""
        from alignedserve.kernels.cpu.structs import Step
        from alignedserve.kernels.triton.decode_attention import balanced_attention
        from alignedserve.kernels.triton.shared_attention import Shared, SharedScratch, shared_tuning
        from alignedserve.kernels.triton.shared_plan import SharedForm, SharedPlan

        num_seqs, num_heads, head_dim = self.q.shape
        num_kv_heads, device = self.cache.shape[3], self.q.device
        tuning = shared_tuning(head_dim, self.q.element_size())
        scratch = SharedScratch(num_heads, head_dim, num_seqs, self._num_sms, device, tuning)
        heads = num_heads // num_kv_heads
        form = SharedForm(num_kv_heads, tuning.rows, heads, BLOCK_SIZE, tuning.tile, None, token_bytes)
        shared = Shared(SharedPlan(form, num_seqs, scratch.num_programs, device), scratch)
        starts, ends = np.arange(num_seqs + 1, dtype=np.int32), np.array(self.lengths, dtype=np.int32) - 1
        table, columns = self._host_table, self._host_table.shape[1]
        from_left = np.zeros_like(ends)
        step = Step(
            query_start=starts.ctypes.data,
            positions=ends.ctypes.data,
            is_reversed=from_left.ctypes.data,
            block_table=table.ctypes.data,
            block_table_stride=columns,
            num_seqs=num_seqs,
        )
        shared.plan.fill(step)
        shared.plan.upload()
        if not int(shared.plan.header[2]):
            raise RuntimeError("the plan shares nothing")
        plan = self.scratch.new_plan()
        self.scratch.make_plan(plan, self.step, num_kv_heads, None, shared)

        def call(layer: int) -> None:
            balanced_attention(
                *(self.q, self.cache[:, layer], self.step, plan, self.scratch, self.scale, None, self.out),
                shared=shared,
            )

        return [partial(call, layer) for layer in range(self.layers)]

    def error(self, call: Callable[[], Any] | None = None) -> float:
        """Returns the error of a call for the first layer, which is `balanced` by default."""
        from alignedserve.kernels.triton.decode_attention import decode_attention_torch

        self.out.fill_(float("nan"))
        (call or partial(self._balanced, 0))()
        expected = decode_attention_torch(self.q, self.cache[:, 0], self.step, self.scale, None)
        return float((self.out.double() - expected).norm() / expected.norm())

    def _balanced(self, layer: int) -> None:
        from alignedserve.kernels.triton.decode_attention import balanced_attention

        balanced_attention(
            self.q, self.cache[:, layer], self.step, self.plan, self.scratch, self.scale, None, self.out
        )

    def _plain(self, layer: int) -> None:
        from alignedserve.kernels.triton.decode_attention import plain_attention

        plain_attention(self.q, self.cache[:, layer], self.step, self.scale, None, self.out, self.tuning)

    def _packed(self) -> torch.Tensor:
        """Returns as much KV again, with each sequence in one piece: [layer, k|v, tokens, kv_head, head_dim]."""
        _, layers, _, num_kv_heads, _, head_dim = self.cache.shape
        packed = torch.empty(
            layers, 2, sum(self.lengths), num_kv_heads, head_dim, dtype=self.q.dtype, device=self.q.device
        )
        for layer in packed:
            layer.normal_(0.0, 0.5)
        return packed

    def _varlen(self) -> list[Callable[[], Any]]:
        kv = self._packed()
        starts = torch.tensor([0, *self.lengths], dtype=torch.int32, device=self.q.device).cumsum(0).int()

        def call(layer: int) -> None:
            k, v = kv[layer]
            longest = max(self.lengths)
            flash_attention(self.q, k, v, self.step.query_start, starts, 1, longest, self.scale, window=None)

        return [partial(call, layer) for layer in range(self.layers)]

    def _sdpa(self) -> list[Callable[[], Any]]:
        kv = torch.unflatten(self._packed(), 2, (len(self.lengths), -1)).transpose(3, 4)
        q = self.q.unsqueeze(2)

        def call(layer: int) -> None:
            k, v = kv[layer]
            F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)

        return [partial(call, layer) for layer in range(self.layers)]

    def _copies(self) -> list[Callable[[], Any]]:
        """Each copy reads half of the bytes and writes as many."""
        flat = self.cache.view(-1)
        half = len(flat) // self.layers // 2
        # An ordinary kernel, because a plain memory copy is slower in a graph.
        target = torch.empty(half, dtype=flat.dtype, device=flat.device)

        def call(layer: int) -> None:
            torch.neg(flat[layer * 2 * half : (layer * 2 + 1) * half], out=target)

        return [partial(call, layer) for layer in range(self.layers)]
