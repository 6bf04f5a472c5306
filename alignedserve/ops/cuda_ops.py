"""Operations on an NVIDIA GPU: Triton kernels of our own around the linear layers of cuBLAS.

In a step of one token, rows go through a kernel of our own that reads each weight once, with the norm before it and
the residual after it in the same pass (kernels/triton/gemv.py). Therefore a norm is not computed where the model asks
for it, but by the operation that needs it (`Normed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from alignedserve.kernels.triton.experts import mix_experts
from alignedserve.kernels.triton.gated_mul import gated_mul
from alignedserve.kernels.triton.gemv import ACTIVATIONS, gemv, gemv_tuning
from alignedserve.kernels.triton.host_copy import receive
from alignedserve.kernels.triton.layer_norm import layer_norm
from alignedserve.kernels.triton.rms_norm import rms_norm
from alignedserve.kernels.triton.sampling import argmax, sample
from alignedserve.kernels.triton.skinny_linear import can_be_skinny, skinny_linear, skinny_tuning
from alignedserve.kernels.triton.truncate import truncate
from alignedserve.ops.base import Activation, AttentionSpec, Projected
from alignedserve.ops.cuda_attention import CudaAttention, has_flash_attention
from alignedserve.ops.cuda_experts import CudaExperts, stack_experts
from alignedserve.ops.cuda_model import CudaModel
from alignedserve.ops.cuda_shapes import chunk_shapes, decode_shapes
from alignedserve.ops.experts import ExpertsSpec, TakeExpert
from alignedserve.ops.step import StepInputs
from alignedserve.ops.step_shape import Ladder
from alignedserve.ops.torch_ops import TorchLinear, TorchOps, activate
from alignedserve.sampling_params import SamplingParams

# What a mixture of experts makes of each choice of a row is there at once, in float32, for so many rows.
MIXED_AT_ONCE = 4096


@dataclass
class Normed:
    """x, which is still to be normed by RMS."""

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


class CudaOps(TorchOps):
    name = "triton"

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        decode_kernel: str = "balanced",
        graph_sizes: Sequence[int] = (),
        use_tqdm: bool = False,
    ) -> None:
        """`graph_sizes` are the batch sizes of decodes for which a CUDA graph is captured; without any, kernels are
        launched one by one."""
        super().__init__(dtype, device)
        self._decode_kernel = decode_kernel
        self._graph_sizes = graph_sizes
        self._use_tqdm = use_tqdm
        self._attention: CudaAttention | None = None

    def embed(
        self,
        table: torch.Tensor | TorchLinear,
        ids: torch.Tensor,
        offset: int = 0,
        add_to: CudaValue | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return super().embed(table, ids, offset, None if add_to is None else _plain(add_to), scale)

    def rms_norm(  # type: ignore[override]
        self, x: CudaValue, weight: torch.Tensor, eps: float, residual: CudaValue | None = None
    ) -> CudaValue:
        if residual is None:
            return Normed(_plain(x), weight, eps)
        # No other operation needs the residual stream: see Ops.rms_norm.
        stream = _plain(residual)
        return rms_norm(_plain(x), weight, eps, out=stream, residual=stream)

    def layer_norm(
        self, x: CudaValue, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return layer_norm(_plain(x), weight, bias, eps)

    def linear(self, x: CudaValue, weight: TorchLinear, residual: CudaValue | None = None) -> torch.Tensor:
        stream = None if residual is None else _plain(residual)
        rows = x.x if isinstance(x, Normed) else x
        if self._adapters_of(weight, len(rows)) is not None:
            return super().linear(_plain(x), weight, stream)
        if len(rows) == 1 and (not weight.activation.is_gated or weight.bias is None):
            return _one_row(x, weight, stream)
        return _many_rows(_plain(x), weight, stream)

    def expert_weights(self, spec: ExpertsSpec, take: TakeExpert) -> CudaExperts:  # type: ignore[override]
        return stack_experts(spec, take, self.dtype, self.device)

    def mix_experts(  # type: ignore[override]
        self, x: CudaValue, logits: torch.Tensor, experts: CudaExperts, residual: CudaValue
    ) -> torch.Tensor:
        spec, stream = experts.spec, _plain(residual)
        swiglu = (spec.swiglu.alpha, spec.swiglu.limit) if spec.swiglu else None
        pieces = (torch.split(each, MIXED_AT_ONCE) for each in (_plain(x), logits, stream))
        for rows, row_logits, out in zip(*pieces, strict=True):
            mix_experts(
                rows,
                row_logits,
                experts.gate_up,
                experts.down,
                spec.top_k,
                spec.normalises,
                out,
                out,
                biases=experts.biases,
                swiglu=swiglu,
            )
        return stream

    def attention(
        self, qkv: torch.Tensor, spec: AttentionSpec, projected: Projected | None = None
    ) -> torch.Tensor:
        if self._attention is None:
            raise RuntimeError("attention can only be called by the functions given to compile")
        step = self._running()
        if step.keeps_inputs and step.kept_inputs is not None:
            restored_kv = self._restore(spec, projected)
            out = self._attention.with_inputs(qkv, spec, step.kept_inputs, restored_kv)
        else:
            out = self._attention(qkv, spec)
        return step.output_rows(out) if spec.outputs_only else out

    def _plain(self, x: CudaValue) -> torch.Tensor:
        return _plain(x)

    def outputs(self, x: CudaValue) -> torch.Tensor:
        return self._running().output_rows(_plain(x))

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return argmax(logits)

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws for all rows in one pass, and does not wait for the GPU."""
        temperature = self._upload([wanted.temperature for wanted in params])
        if any(wanted.truncates for wanted in params):
            top_k = self._upload([max(wanted.top_k, 0) for wanted in params], torch.int32)
            top_p = self._upload([wanted.top_p for wanted in params])
            min_p = self._upload([wanted.min_p for wanted in params])
            truncate(logits, temperature, top_k, top_p, min_p)
            # `truncate` has divided by the temperature already.
            temperature = (temperature > 0).float()
        return sample(logits, self._send(keys), temperature)

    def _upload(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._send(torch.tensor(values, dtype=dtype))

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        """Sends from pinned memory, because a copy from other memory waits for all that was launched before."""
        if self.device.type != "cuda":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)

    def compile(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        step: StepInputs,
        max_rows: int,
        is_trial: bool = False,
        final_states: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> CudaModel:
        if self._cache is None:
            raise ValueError("bind_cache comes before compile")
        attention = self._attention = CudaAttention(self._cache, step, self._decode_kernel)
        self._step = step

        step.send = receive

        def run_step() -> torch.Tensor:
            attention.begin()
            return _plain(forward(step))

        def run_final(hidden: torch.Tensor) -> torch.Tensor:
            if final_states is None:
                raise RuntimeError("compiled without final_states")
            return _plain(final_states(hidden))

        model = CudaModel(run_step, lambda hidden: _plain(logits(hidden)), argmax, step, max_rows, run_final)
        if self._graph_sizes and not is_trial:
            self._capture(model, step)
        return model

    def _capture(self, model: CudaModel, step: StepInputs) -> None:
        assert self._cache is not None
        shapes = decode_shapes(self._graph_sizes, step)
        if self.device.type != "cuda":
            # Nothing can be captured here, but steps are filled up all the same.
            step.ladder = Ladder(shapes + chunk_shapes(step, self._cache))
            return
        if has_flash_attention(self.device, self.dtype):
            shapes += chunk_shapes(step, self._cache)
        model.capture(shapes, self._use_tqdm)


def _plain(x: CudaValue) -> torch.Tensor:
    return x.value if isinstance(x, Normed) else x


def _one_row(x: CudaValue, weight: TorchLinear, residual: torch.Tensor | None) -> torch.Tensor:
    is_gated = weight.activation.is_gated
    num_out, num_in = weight.weight.shape
    row = x.x if isinstance(x, Normed) else x
    out = row.new_empty(1, num_out // 2 if is_gated else num_out) if residual is None else residual
    return gemv(
        row,
        weight.weight,
        out,
        gemv_tuning(num_in, num_out, is_gated),
        bias=weight.bias,
        residual=residual,
        norm=x.weight if isinstance(x, Normed) else None,
        norm_eps=x.eps if isinstance(x, Normed) else 0.0,
        activation=ACTIVATIONS[weight.activation.value],
    )


def _many_rows(x: torch.Tensor, weight: TorchLinear, residual: torch.Tensor | None) -> torch.Tensor:
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
    out = F.linear(x, weight.weight, weight.bias)
    if weight.activation.is_gated:
        return gated_mul(out, gelu=weight.activation is Activation.GELU_TANH_GATED)
    return activate(out, weight.activation)
