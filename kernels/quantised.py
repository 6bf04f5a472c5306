"""A weight in codes, and linear layers of it in plain torch: the reference of the native kernels (`cpu/`).

    kind   codes               a value
    int4   0 to 15             (code - zero) * scale; zero is 8 without `zeros`
    int8   0 to 255            (code - zero) * scale; zero is 128 without `zeros`
    fp8    float8_e4m3fn       code * scale
    mxfp4  0 to 15             E2M1[code] * scale; groups of 32, with powers of two as scales

Inputs are in groups. Each output has a scale for each of its groups, and a zero, if the weight has zeros. With integer
weights, rows are quantised to eight bits, as in `int8.py`. Sums of a group are exact integers. They are scaled and
added in float32, in the order of groups. With FP8 and MXFP4, rows stay as they are, and a group's sum is in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from alignedserve.kernels.int8 import MAX_IN_FEATURES, linear_int8, quantise_columns, quantise_rows

INT8, INT4, FP8, MXFP4 = "int8", "int4", "fp8", "mxfp4"
BITS = {INT8: 8, INT4: 4, FP8: 8, MXFP4: 4}
# The zero of integer weights without `zeros`.
ZEROS = {INT8: 128, INT4: 8}
# A group's size is a multiple of this, unless there is only one group. MXFP4 groups are exactly 32.
BLOCK = {INT8: 32, INT4: 32, FP8: 2, MXFP4: 32}
FP8_DTYPE = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
# A sign, two bits of an exponent, and one of a fraction.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [out, in]. Raises ValueError if its tensors do not match."""

    kind: str
    # uint8 with one code each, or float8_e4m3fn.
    codes: torch.Tensor
    # [out, groups] in bfloat16, or float32
    scales: torch.Tensor
    # [out, groups] uint8
    zeros: torch.Tensor | None
    # Inputs per scale.
    group: int

    def __post_init__(self) -> None:
        num_out, num_in = self.codes.shape
        if self.is_integer and num_in > MAX_IN_FEATURES:
            raise ValueError(f"a layer of {num_in} inputs: {self.kind} takes {MAX_IN_FEATURES} at most")
        if self.group % BLOCK[self.kind] and self.group < num_in:
            raise ValueError(f"groups of {self.group} inputs: must be multiples of {BLOCK[self.kind]}")
        if self.kind == MXFP4 and (self.group != BLOCK[MXFP4] or num_in % self.group):
            raise ValueError(
                f"{num_in} inputs in groups of {self.group}: mxfp4 takes whole groups of {BLOCK[MXFP4]}"
            )
        shape = (num_out, -(-num_in // self.group))
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, not {tuple(tensor.shape)}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def is_integer(self) -> bool:
        return self.kind in ZEROS

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    @property
    def is_int8_columns(self) -> bool:
        """Whether it has one scale for each output and nothing else, which is the form that `int8.py` multiplies."""
        return self.kind == INT8 and self.zeros is None and self.num_groups == 1

    @property
    def num_bytes(self) -> int:
        """Bytes in stored form: see kernels/cpu/csrc/groups.h. On a GPU a zero takes one byte instead of two."""
        num_codes = self.codes.numel() * BITS[self.kind] // 8
        num_zeros = 0 if self.zeros is None else 2 * self.zeros.numel()
        return num_codes + self.scales.numel() * self.scales.dtype.itemsize + num_zeros

    def to(self, device: torch.device) -> QuantisedWeight:
        """The weight on this device. Tensors that are there already are shared."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros)

    def rows(self, first: int, end: int, step: int = 1) -> QuantisedWeight:
        """The weight of some of the outputs. Shares the memory."""
        some = slice(first, end, step)
        zeros = None if self.zeros is None else self.zeros[some]
        return replace(self, codes=self.codes[some], scales=self.scales[some], zeros=zeros)

    def columns(self, first: int, end: int) -> QuantisedWeight:
        """The weight of some of the inputs: whole groups, or any part of the only group. Shares the memory."""
        if self.num_groups == 1:
            return replace(self, codes=self.codes[:, first:end])
        if first % self.group or (end % self.group and end != self.shape[1]):
            raise ValueError(f"inputs {first} to {end}: must be whole groups of {self.group}")
        groups = slice(first // self.group, -(-end // self.group))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(self, codes=self.codes[:, first:end], scales=self.scales[:, groups], zeros=zeros)

    def with_zeros(self) -> torch.Tensor:
        """The zeros of integer weights, even if all are the default."""
        if self.zeros is not None:
            return self.zeros
        return torch.full(self.scales.shape, ZEROS[self.kind], dtype=torch.uint8, device=self.codes.device)

    def dequantised(self) -> torch.Tensor:
        """The values in float32."""
        values = self.numbers()
        if self.is_integer:
            values = values - self._of_inputs(self.with_zeros().float())
        return values * self._of_inputs(self.scales.float())

    def numbers(self) -> torch.Tensor:
        """The codes' values in float32, without zeros and scales."""
        if self.kind == MXFP4:
            return torch.tensor(E2M1, device=self.codes.device)[self.codes.int()]
        return self.codes.float()

    def _of_inputs(self, of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.repeat_interleave(self.group, 1)[:, : self.shape[1]]


def quantise_fp8(weight: torch.Tensor) -> QuantisedWeight:
    """Scales each output's largest value to the largest of FP8. Raises ValueError if it is not finite."""
    codes = torch.empty(weight.shape, dtype=FP8_DTYPE, device=weight.device)
    scales = weight.abs().amax(1, keepdim=True).float() / LARGEST_FP8
    if not scales.isfinite().all():
        raise ValueError("a weight that is not finite can't be quantized to FP8")
    step = max(1, (1 << 22) // weight.shape[1])
    for first in range(0, len(weight), step):
        piece = slice(first, first + step)
        inverse = torch.where(scales[piece] > 0, 1 / scales[piece], 0.0)
        codes[piece] = (weight[piece].float() * inverse).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8_DTYPE)
    return QuantisedWeight(FP8, codes, scales, None, weight.shape[1])


def quantise_int8(weight: torch.Tensor) -> QuantisedWeight:
    """See int8.py."""
    codes, scales = quantise_columns(weight)
    return QuantisedWeight(
        INT8, codes.view(torch.uint8).bitwise_xor_(0x80), scales.unsqueeze(1), None, weight.shape[1]
    )


def to_unsigned(codes: torch.Tensor) -> torch.Tensor:
    """int8, from -128, to uint8, from 0. They differ in one bit."""
    return codes.view(torch.uint8) ^ 0x80


def to_signed(codes: torch.Tensor) -> torch.Tensor:
    return (codes ^ 0x80).view(torch.int8)


def side_by_side(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """One weight with the outputs of all. Raises ValueError if their forms differ."""
    first = parts[0]
    for other in parts[1:]:
        if (other.kind, other.num_groups) != (first.kind, first.num_groups) or (
            first.num_groups > 1 and other.group != first.group
        ):
            raise ValueError(
                f"parts of one layer must be alike, not {first.kind} in {first.num_groups} groups of {first.group} "
                f"and {other.kind} in {other.num_groups} groups of {other.group}"
            )
    # A mixture of bfloat16 and float32 becomes float32.
    scales = torch.cat([part.scales for part in parts])
    has_zeros = any(part.zeros is not None for part in parts)
    zeros = torch.cat([part.with_zeros() for part in parts]) if has_zeros else None
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype)
    return QuantisedWeight(first.kind, codes, scales, zeros, first.group)


def linear_quantised(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x @ weight.T + bias, in float32."""
    if weight.is_int8_columns:
        return linear_int8(x, to_signed(weight.codes), weight.scales.flatten(), bias)
    out = _linear_integers(x, weight) if weight.is_integer else _linear_floats(x, weight)
    return out if bias is None else out + bias.float()


def _linear_integers(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """Float64 holds a group's sums exactly, and the results that they are added to."""
    rows, of_rows = quantise_rows(x)
    out = torch.zeros(len(rows), len(weight.codes), device=x.device)
    zeros, scales = weight.with_zeros().double(), weight.scales.double()
    codes = torch.split(weight.codes, weight.group, dim=1)
    for group, part in enumerate(torch.split(rows.double(), weight.group, dim=1)):
        sums = (part @ (codes[group].double() - zeros[:, group : group + 1]).T).float().double()
        out = (sums * scales[:, group] + out.double()).float()
    return out * of_rows.unsqueeze(1)


def _linear_floats(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    out = torch.zeros(len(x), len(weight.codes), device=x.device)
    codes = torch.split(weight.numbers(), weight.group, dim=1)
    for group, part in enumerate(torch.split(x.float(), weight.group, dim=1)):
        out += (part @ codes[group].T) * weight.scales[:, group].float()
    return out
