"""Linear layers of the CUDA backend, by the number of rows, for weights in floating point or in codes.

    rows       in floating point                                 in codes
    1          gemv.py, with the norm before it                  the same, which reads codes
    a few      cuBLAS, or skinny_linear.py where that is faster  skinny_linear.py, which reads codes
    more       cuBLAS                                            a piece of the weight at a time, and cuBLAS

Rows stay in the dtype for every kind of weight (adr/0037).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from alignedserve.kernels.triton.coded_weight import CodedWeight, dequantise
from alignedserve.kernels.triton.gated_mul import gated_mul
from alignedserve.kernels.triton.gemv import ACTIVATIONS, coded_gemv_tuning, gemv, gemv_tuning
from alignedserve.kernels.triton.rms_norm import rms_norm
from alignedserve.kernels.triton.skinny_linear import (
    can_be_skinny,
    coded_skinny_tuning,
    skinny_linear,
    skinny_tuning,
)
from alignedserve.ops.base import Activation
from alignedserve.ops.torch_ops import TorchLinear, activate

# Dequantise at most this many bytes of a weight at a time, so that the result is still in L2 when it is multiplied. To
# be measured.
DEQUANTISED_BYTES = 32 << 20


@dataclass
class Normed:
    """x, before an RMS norm that is still to be applied."""

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    _value: torch.Tensor | None = field(default=None, repr=False)

    @property
    def value(self) -> torch.Tensor:
        if self._value is None:
            self._value = rms_norm(self.x, self.weight, self.eps)
        return self._value


CudaValue = torch.Tensor | Normed


def plain(x: CudaValue) -> torch.Tensor:
    return x.value if isinstance(x, Normed) else x


@dataclass(frozen=True)
class CudaCodedLinear(TorchLinear):
    """A layer with a weight in codes. `weight` is the codes alone."""

    coded: CodedWeight = field(kw_only=True)

    @property
    def kind(self) -> str:
        return self.coded.kind

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return coded_linear(x, self.coded, self.bias)

    def outputs_from(self, first: int) -> CudaCodedLinear:
        self._check_no_adapters()
        rows = self.coded.rows(first, len(self.weight))
        return CudaCodedLinear(rows.codes, self._bias_from(first), self.activation, self.split, coded=rows)


def own_part(x: CudaValue, weight: TorchLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The result of this process's part of the layer, which is the whole layer unless it is split over ranks."""
    rows = x.x if isinstance(x, Normed) else x
    if len(rows) == 0:
        # The last layer of a step without outputs.
        num_out = len(weight.weight) // 2 if weight.activation.is_gated else len(weight.weight)
        return rows.new_empty(0, num_out) if residual is None else residual
    if len(rows) == 1 and (not weight.activation.is_gated or weight.bias is None):
        return _one_row(x, weight, residual)
    return _many_rows(plain(x), weight, residual)


def _one_row(x: CudaValue, weight: TorchLinear, residual: torch.Tensor | None) -> torch.Tensor:
    is_gated = weight.activation.is_gated
    row = x.x if isinstance(x, Normed) else x
    if isinstance(weight, CudaCodedLinear):
        values: torch.Tensor | CodedWeight = weight.coded
        tuning = coded_gemv_tuning(weight.coded, is_gated)
    else:
        values = weight.weight
        tuning = gemv_tuning(values.shape[1], values.shape[0], is_gated)
    num_out = values.shape[0]
    out = row.new_empty(1, num_out // 2 if is_gated else num_out) if residual is None else residual
    return gemv(
        row,
        values,
        out,
        tuning,
        bias=weight.bias,
        residual=residual,
        norm=x.weight if isinstance(x, Normed) else None,
        norm_eps=x.eps if isinstance(x, Normed) else 0.0,
        activation=ACTIVATIONS[weight.activation.value],
    )


def _many_rows(x: torch.Tensor, weight: TorchLinear, residual: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, CudaCodedLinear):
        out = coded_linear(x, weight.coded, weight.bias, residual)
        return _activated(out, weight.activation)
    if residual is not None:
        num_out, num_in = weight.weight.shape
        tuning = skinny_tuning(len(x), num_in, num_out) if can_be_skinny(x) else None
        if tuning is not None:
            return skinny_linear(x, weight.weight, residual, tuning, weight.bias, residual)
        # No other operation needs the residual stream: see Ops.linear.
        residual.addmm_(x, weight.weight.t())
        return residual if weight.bias is None else residual.add_(weight.bias)
    if weight.activation is Activation.RELU and weight.bias is not None and x.is_cuda:
        return torch._addmm_activation(weight.bias, x, weight.weight.t())
    return _activated(F.linear(x, weight.weight, weight.bias), weight.activation)


def coded_linear(
    x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias + residual. Overwrites the residual."""
    tuning = coded_skinny_tuning(x, weight)
    if tuning is None:
        return linear_in_pieces(x, weight, bias, residual)
    out = x.new_empty(len(x), weight.shape[0]) if residual is None else residual
    return skinny_linear(x, weight, out, tuning, bias, residual)


def linear_in_pieces(
    x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The same by cuBLAS, with a piece of the weight at a time in x's dtype."""
    num_out, num_in = weight.shape
    out = x.new_empty(len(x), num_out) if residual is None else residual
    at_once = max(DEQUANTISED_BYTES // (256 * num_in * x.element_size()), 1) * 256
    for first in range(0, num_out, at_once):
        some = weight.rows(first, min(first + at_once, num_out))
        values = dequantise(some, x.new_empty(some.shape))
        columns = out[:, first : first + len(values)]
        if residual is None:
            torch.mm(x, values.t(), out=columns)
        else:
            columns.addmm_(x, values.t())
    return out if bias is None else out.add_(bias)


def _activated(out: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation.is_gated:
        return gated_mul(out, gelu=activation is Activation.GELU_TANH_GATED)
    return activate(out, activation)
