"""The least time that a job takes on a processor: its products at the processor's rate, and its bytes at the memory's.
Pure.

The beginning of each kind of line is computed once, and its KV is read once per iteration. All else is computed and
read for each line. Nothing is counted for sampling, planning, scheduling and the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    num_lines: int
    # Tokens that lines have in common, tokens of each line's own, and tokens of its answer.
    common: int
    own: int
    out: int
    # The number of different beginnings.
    num_beginnings: int = 1
    # Whether all lines are one prompt with many answers, so that there is nothing of their own.
    is_one_prompt: bool = False

    @property
    def num_out(self) -> int:
        return self.num_lines * self.out


@dataclass(frozen=True)
class Shape:
    """A Llama with 2 bytes per number, as `benchmarks.cpu_vs_vllm` makes it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """The numbers in the linear layers, without the output layer's."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    def attention_flop(self, num_pairs: float) -> float:
        """Returns the FLOP of `num_pairs` pairs of a query and a key."""
        return 4.0 * self.heads * self.head_dim * self.layers * num_pairs

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * self.kv_heads * self.head_dim * self.layers


@dataclass(frozen=True)
class Machine:
    """What all cores do together per second."""

    flops: float
    bytes_per_s: float


@dataclass(frozen=True)
class Floor:
    """Seconds."""

    beginnings_s: float
    own_s: float
    decodes_s: float

    @property
    def total_s(self) -> float:
        return self.beginnings_s + self.own_s + self.decodes_s


def floor(job: Job, shape: Shape, machine: Machine, num_rows: int) -> Floor:
    """`num_rows` lines decode at once."""

    def prompt_s(num_tokens: int, first: int) -> float:
        num_pairs = num_tokens * (first + (num_tokens + 1) / 2)
        return (2.0 * shape.layer_weights * num_tokens + shape.attention_flop(num_pairs)) / machine.flops

    num_own = 0 if job.is_one_prompt else job.own
    head_s = 2.0 * shape.head_weights / machine.flops
    rows = min(num_rows, job.num_lines)
    # An iteration in the middle of the answers.
    own_len = num_own + job.out / 2
    weights = shape.layer_weights + shape.head_weights
    num_keys = min(job.num_beginnings, rows) * job.common + rows * own_len
    num_bytes = 2.0 * weights + shape.kv_bytes * num_keys
    flop = rows * 2.0 * weights + shape.attention_flop(rows * (job.common + own_len))
    iteration_s = max(num_bytes / machine.bytes_per_s, flop / machine.flops)
    # The first token comes with the prompt.
    num_iterations = job.num_lines * (job.out - 1) / rows
    return Floor(
        beginnings_s=job.num_beginnings * prompt_s(job.common, 0),
        own_s=(job.num_lines * (prompt_s(num_own, job.common) + head_s)),
        decodes_s=num_iterations * iteration_s,
    )
