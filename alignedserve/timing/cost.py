"""How long an iteration and a transfer take. Pure: for the simulator, and for decisions that need a prediction.

    iteration = prefill_token_s * prompt tokens + fixed costs + experts + attention of chunks + attention of decodes
    fixed costs = the longest of the decode lines (fixed_s + token_s * decodes) and, with chunks, prefill_fixed_s

**Decode lines.** An iteration reads all weights once, whatever runs in it. Arithmetic and bookkeeping grow with the
number of requests. The longer of the two is the time: a flat line and a steep one. DistServe's published fits jump from
one line to the other at 95 requests. The longer of both has no jump: for OPT-13B they cross at 107, and differ by 1.4
ms at 95.

**Experts.** An iteration reads only those experts of a mixture that some token goes through. Each token chooses
k of E experts, so n tokens are expected to hit the share 1 - (1 - k/E)^n. That share rises steeply and then levels off,
which a maximum of lines can't express. Reading experts is therefore a term of its own, `experts_s` times that share.
Tokens of prompts and decodes count alike.

**Attention of a chunk** of c tokens after b others costs its share of the prompt's quadratic cost, k*(2bc + c^2). A
prompt thus costs k*n^2, whatever its chunks are. A chunk costs at least the reading of the KV of all b + c tokens. If
KV is first converted (gathered from blocks, packed for matrix units), that adds `prefill_context_s` per token.

**Attention of decodes** reads KV. `decode_attention_s` is the time per token of KV when the whole device reads: 0.63 us
in the fits of OPT-13B. That is 1.3 TB/s of an A100's 2.0, so it is bandwidth alone. A CPU's caches hold some of the KV;
tokens beyond `num_near_tokens` cost `decode_far_s` more. The fits don't show what unequal lengths cost: their batches
had one length, for which sum and count * max are the same number.

- "balanced" (split-KV: every part of the device gets the same amount of KV): the sum of lengths.
- "plain" (one program per sequence and KV head): programs share the bandwidth, but one alone can use only a part.
  Let m = `num_filling` be the number of sequences that fill the device; fewer take the time of m. With falling lengths
  l1 >= l2 >= ... >= ln and l(n+1) = 0, the cost is

      sum over i of (l_i - l_(i+1)) * max(i, m)

  In words: each of the m longest costs as much as the longest. For batches of one length this is the sum again, as
  fitted. m = bandwidth / (KV heads * bandwidth of one program): 2 for OPT's 40 heads, 25 and more for few KV heads.
  No fit contains the bandwidth of one program. The presets assume 15 GB/s (by Little's law: 8 KiB in flight, 0.55 us).
  A cost model of another device can set its own value.
- "padded" (every sequence takes as long as the longest): count * max. The worst that unequal lengths can cost.

**Shared KV.** Kernels may read a block once for all decodes that share it. Each decode still multiplies by all of it,
so its time for a shared token falls by a part: `shared_saving` is what two decodes would save if one of them cost
nothing. A decode counts as shorter by that share of the tokens that others read for it. With k decodes that is
(k - 1) / k of each shared token. The sum of the lengths then contains each shared token once, and the products of all.

**Windows.** If every layer attends to the latest W tokens only, a longer prefix costs as much as one of W tokens, in
decodes and in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

Attention = Literal["balanced", "plain", "padded"]


class IterationLoad(NamedTuple):
    # Tokens computed before, and tokens to compute, of each chunk.
    chunks: Sequence[tuple[int, int]]
    # The length of each decode's prefix.
    lengths: Sequence[int] = ()
    # Tokens with K and V restored from inputs.
    num_restored: int = 0


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Read from JSON: see cost_presets.py."""


class LinearCost(Record, frozen=True):
    fixed_s: float
    token_s: float


class CopyChannel(Record, frozen=True):
    """Makes one copy at a time."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class Channels(Record, frozen=True):
    # From a prefill or decode instance to the pool.
    save: CopyChannel
    # From the pool to a prefill instance.
    stage: CopyChannel
    # From a prefill to a decode instance (NVLink).
    admit: CopyChannel
    # From the pool to a decode instance (PCIe).
    fetch: CopyChannel


class HostResources(Record, frozen=True):
    """Resources that the instances of one host share, beside their own channels."""

    gpus_per_instance: int = 1
    # GPUs behind one PCIe root; they share the bandwidth of one GPU's channel in each direction
    gpus_per_pcie_root: int = 1
    # bytes per second of all copies from and to the pool together, in both directions; None: no copy is slowed
    memory_bytes_per_s: float | None = None


class ExpertCounts(Record, frozen=True):
    """The experts of each mixture in a model, and the experts per token."""

    num_experts: int
    top_k: int

    def hit_share(self, num_tokens: float) -> float:
        """The expected share of the experts that `num_tokens` tokens go through, if they choose evenly."""
        return 1 - float((1 - self.top_k / self.num_experts) ** num_tokens)


# The channels of a cost model without measured copies: they take no time.
_FREE = CopyChannel(0.0, 1e15)
FREE_COPIES = Channels(_FREE, _FREE, _FREE, _FREE)


# Fields with default values are not written, so that an earlier version, which lacks newer fields, can read the file.
class CostModel(Record, frozen=True, omit_defaults=True):
    # The origin of the numbers.
    source: str
    kv_bytes_per_token: int
    # Tokens of KV that fit beside the weights.
    num_kv_tokens: int
    prefill_fixed_s: float
    prefill_token_s: float
    # Seconds per pair of a token and one before it.
    prefill_attention_s: float
    decode_lines: list[LinearCost]
    # Seconds per token of KV when the whole device reads.
    decode_attention_s: float
    # Sequences with which a plain kernel makes the whole device read.
    num_filling: float
    channels: Channels
    host: HostResources = HostResources()
    attention: Attention = "balanced"
    # Seconds per token of KV that a chunk attends to, its own included, in addition to its computation.
    prefill_context_s: float = 0.0
    # Additional seconds per token of KV beyond num_near_tokens, which is as much as a CPU's caches hold.
    decode_far_s: float = 0.0
    num_near_tokens: int = 0
    # Seconds to restore K and V of one token from layers' inputs (ops/kept_inputs.py); 0: see `restoring`.
    restored_token_s: float = 0.0
    # Bytes per token in the pool, if they differ from an instance's; 0: they don't.
    pool_kv_bytes_per_token: float = 0.0
    # Latest tokens that a token attends to in every layer, itself included; 0: all.
    window: int = 0

    # The share of the seconds per token of KV that a decode saves if another one reads the same KV: see above. 0 where
    # kernels read it for each.
    shared_saving: float = 0.0

    # For a mixture of experts. `experts_s`: seconds to read all experts of all layers.
    expert_counts: ExpertCounts | None = None
    experts_s: float = 0.0

    @property
    def has_free_copies(self) -> bool:
        """Whether copies of KV count as free, because they were not measured."""
        return self.channels == FREE_COPIES

    @property
    def pool_bytes_per_token(self) -> float:
        return self.pool_kv_bytes_per_token or self.kv_bytes_per_token

    def with_pool(self, bytes_per_token: float) -> CostModel:
        if bytes_per_token == self.kv_bytes_per_token:
            return self
        return msgspec.structs.replace(self, pool_kv_bytes_per_token=bytes_per_token)

    def with_kv(self, bytes_per_token: int) -> CostModel:
        """Returns the model of the same device with another size of KV per token. Its memory holds proportionally more
        or fewer tokens, and attention takes as long as before for the same bytes."""
        if bytes_per_token == self.kv_bytes_per_token:
            return self
        share = bytes_per_token / self.kv_bytes_per_token
        return msgspec.structs.replace(
            self,
            kv_bytes_per_token=bytes_per_token,
            num_kv_tokens=self.num_kv_tokens * self.kv_bytes_per_token // bytes_per_token,
            decode_attention_s=self.decode_attention_s * share,
            decode_far_s=self.decode_far_s * share,
            num_near_tokens=int(self.num_near_tokens / share),
        )

    def with_window(self, window: int) -> CostModel:
        return msgspec.structs.replace(self, window=window)

    def restoring(self, num_tokens: int) -> float:
        """Seconds to restore K and V of `num_tokens` tokens from inputs.

        If that was not measured, it is the share of a prompt's linear layers that K and V have in OPT: two of twelve
        parts.
        """
        return (self.restored_token_s or self.prefill_token_s / 6) * num_tokens

    def iteration(
        self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int], num_restored: int = 0
    ) -> float:
        """Seconds of an iteration. Its parameters are the fields of `IterationLoad`."""
        # Policies call this many times in an iteration, so it makes no call for an absent part.
        num_decodes = len(lengths)
        num_prompt_tokens, chunks_s = self.sum_of(chunks) if chunks else (0, 0.0)
        return (
            self.fixed_s(bool(chunks), num_decodes)
            + self.prefill_token_s * num_prompt_tokens
            + (self.reading_experts(num_prompt_tokens + num_decodes) if self.expert_counts else 0.0)
            + chunks_s
            + (self.decode_attention(lengths) if num_decodes else 0.0)
            + (self.restoring(num_restored) if num_restored else 0.0)
        )

    def fixed_s(self, has_chunks: bool, num_decodes: int) -> float:
        """Seconds of an iteration that do not depend on its requests' lengths."""
        seconds = self.prefill_fixed_s if has_chunks else 0.0
        for line in self.decode_lines if num_decodes else ():
            line_s = line.fixed_s + line.token_s * num_decodes
            if line_s > seconds:
                seconds = line_s
        return seconds

    def sum_of(self, chunks: Sequence[tuple[int, int]]) -> tuple[int, float]:
        """Returns the number of tokens to compute in these chunks, and the seconds of their attention.

        It adds in order, so that one more chunk can be added to the result. From Python 3.12 on, `sum` compensates for
        rounding, and its result would differ in the last bit.
        """
        num_tokens, seconds = 0, 0.0
        for before, count in chunks:
            num_tokens += count
            seconds += self.chunk_s(before, count)
        return num_tokens, seconds

    def reading_experts(self, num_tokens: int) -> float:
        """Seconds to read the experts that `num_tokens` tokens go through."""
        return self.experts_s * self.expert_counts.hit_share(num_tokens) if self.expert_counts else 0.0

    def chunks_together(self) -> ChunkCosts:
        return ChunkCosts(self)

    def one_more_chunk(self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]) -> OneMoreChunk:
        return OneMoreChunk(self, chunks, lengths)

    def first_decodes(self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]) -> FirstDecodes:
        return FirstDecodes(self, chunks, lengths)

    def fastest_tbt_s(self, num_tokens: int) -> float:
        """Seconds between two tokens of a request that decodes alone after `num_tokens` tokens."""
        return self.iteration([], [num_tokens])

    def fastest_ttft_s(self, num_tokens: int, max_chunk: int) -> float:
        """Seconds until the first token of a prompt that is computed alone, in chunks of `max_chunk`."""
        return sum(
            self.iteration([(before, min(max_chunk, num_tokens - before))], [])
            for before in range(0, num_tokens, max_chunk)
        )

    def chunk_s(self, before: int, count: int) -> float:
        if self.window:
            num_pairs, num_read = (
                chunk_pairs(before, count, self.window),
                chunk_reads(before, count, self.window),
            )
        else:
            num_pairs, num_read = (2 * before + count) * count, before + count
        compute_s, reading_s = self.prefill_attention_s * num_pairs, self.decode_attention_s * num_read
        return (compute_s if compute_s > reading_s else reading_s) + self.prefill_context_s * num_read

    def decode_attention(self, lengths: Sequence[int]) -> float:
        if self.window:
            lengths = seen_lengths(lengths, self.window)
        match self.attention:
            case "balanced":
                num_read: float = sum(lengths)
            case "plain":
                num_read = plain_cost(lengths, self.num_filling)
            case "padded":
                num_read = len(lengths) * max(lengths, default=0)
        return self.reading_s(num_read)

    def reading_s(self, num_read: float) -> float:
        """Seconds in which decodes read the KV of `num_read` tokens, if the whole device reads."""
        near_s = self.decode_attention_s * num_read
        if not self.decode_far_s:
            return near_s
        return near_s + self.decode_far_s * max(num_read - self.num_near_tokens, 0)

    def with_attention(self, attention: Attention) -> CostModel:
        return msgspec.structs.replace(self, attention=attention)


class ChunkCosts:
    """The cost of an iteration's chunks while they are chosen. The cost with one more chunk takes constant time."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._num_tokens = 0
        self._sum_s = 0.0

    def add(self, before: int, count: int) -> None:
        self._num_tokens += count
        self._sum_s += self._model.chunk_s(before, count)

    def seconds_with(self, before: int, count: int) -> float:
        """The same as `CostModel.iteration` of all these chunks and one more."""
        model = self._model
        num_tokens = self._num_tokens + count
        linear_s = model.prefill_token_s * num_tokens + model.reading_experts(num_tokens)
        return model.prefill_fixed_s + linear_s + (self._sum_s + model.chunk_s(before, count))


class OneMoreChunk:
    """The cost of an iteration of these chunks and decodes and one more chunk, to search for that chunk's size."""

    def __init__(self, model: CostModel, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        self._model = model
        self._num_decodes = len(lengths)
        self._num_tokens, self._chunks_s = model.sum_of(chunks)
        self._fixed_s = model.fixed_s(True, len(lengths))
        self._attention_s = model.decode_attention(lengths) if lengths else 0.0

    def seconds_with(self, before: int, count: int) -> float:
        """The same as `CostModel.iteration`, to the last bit: terms are added in the same order."""
        model, num_tokens = self._model, self._num_tokens + count
        return (
            self._fixed_s
            + model.prefill_token_s * num_tokens
            + (model.reading_experts(num_tokens + self._num_decodes) if model.expert_counts else 0.0)
            + (self._chunks_s + model.chunk_s(before, count))
            + self._attention_s
        )


class FirstDecodes:
    """The cost of an iteration of these chunks and the first few of these decodes, to search for their number."""

    def __init__(self, model: CostModel, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        self._model = model
        self._has_chunks = bool(chunks)
        self._lengths = lengths
        self._num_tokens, self._chunks_s = model.sum_of(chunks)
        self._sums: list[int] | None = None
        if model.attention == "balanced":
            self._sums = [0, *accumulate(seen_lengths(lengths, model.window))]

    def seconds(self, num_decodes: int) -> float:
        """The same as `CostModel.iteration`, to the last bit."""
        model, num_tokens = self._model, self._num_tokens
        return (
            model.fixed_s(self._has_chunks, num_decodes)
            + model.prefill_token_s * num_tokens
            + (model.reading_experts(num_tokens + num_decodes) if model.expert_counts else 0.0)
            + self._chunks_s
            + self._attention_s(num_decodes)
        )

    def _attention_s(self, num_decodes: int) -> float:
        if self._sums is not None:
            return self._model.reading_s(self._sums[num_decodes])
        return self._model.decode_attention(self._lengths[:num_decodes])


def seen_lengths(lengths: Sequence[int], window: int) -> Sequence[int]:
    """The number of tokens that each of these decodes attends to."""
    return [min(length, window) for length in lengths] if window else lengths


def chunk_pairs(before: int, count: int, window: int) -> int:
    """The cost of a chunk's attention: twice the number of pairs of its tokens and the tokens that they attend to."""
    # These of its tokens attend to all tokens before them, and the others to a window each.
    num_whole = min(max(window - before, 0), count) if window else count
    return 2 * before * num_whole + num_whole * num_whole + 2 * window * (count - num_whole)


def chunk_reads(before: int, count: int, window: int) -> int:
    """The number of tokens that a chunk attends to, its own included."""
    return (min(before, window) if window else before) + count


def plain_cost(lengths: Sequence[int], num_filling: float) -> float:
    """The cost, as tokens of KV that the whole device could read in the same time."""
    falling = sorted(lengths, reverse=True)
    cost = float(sum(falling))
    for rank, length in enumerate(falling, start=1):
        if rank >= num_filling:
            break
        next_length = falling[rank] if rank < len(falling) else 0
        cost += (length - next_length) * (num_filling - rank)
    return cost
