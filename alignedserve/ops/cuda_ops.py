"""Operations on an NVIDIA GPU: our own Triton kernels, and cuBLAS for linear layers.

In a step of one token, a kernel of our own reads each weight once, with the norm before it and the residual after it in
the same pass (kernels/triton/gemv.py). A norm is therefore not computed at the model's call, but by the operation that
needs it (`Normed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from alignedserve.kernels.quantised import QuantisedWeight
from alignedserve.kernels.triton.coded_weight import CodedWeight
from alignedserve.kernels.triton.experts import mix_experts
from alignedserve.kernels.triton.host_copy import receive
from alignedserve.kernels.triton.layer_norm import layer_norm
from alignedserve.kernels.triton.rms_norm import rms_norm
from alignedserve.kernels.triton.sampling import argmax, sample
from alignedserve.kernels.triton.truncate import truncate
from alignedserve.ops.base import Activation, AttentionSpec, Projected
from alignedserve.ops.cuda_attention import CudaAttention, has_flash_attention
from alignedserve.ops.cuda_experts import CudaExperts, stack_experts
from alignedserve.ops.cuda_linear import CudaCodedLinear, CudaValue, Normed, own_part, plain
from alignedserve.ops.cuda_model import CudaModel
from alignedserve.ops.cuda_shapes import chunk_shapes, decode_shapes
from alignedserve.ops.experts import ExpertsSpec, TakeExpert
from alignedserve.ops.ranks import RankGroup
from alignedserve.ops.shard import Split
from alignedserve.ops.step import StepInputs
from alignedserve.ops.step_shape import Ladder
from alignedserve.ops.torch_ops import TorchLinear, TorchOps
from alignedserve.ops.torch_ranks import TorchRanks
from alignedserve.sampling_params import SamplingParams

# Rows that a mixture of experts computes at once. The result of every expert of a row is in memory, in float32.
MIXED_AT_ONCE = 4096


class CudaOps(TorchOps):
    name = "triton"

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        decode_kernel: str = "balanced",
        graph_sizes: Sequence[int] = (),
        use_tqdm: bool = False,
        quantization: str | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """`graph_sizes`: batch sizes of decodes for which a CUDA graph is captured. Without any, kernels are
        launched one by one."""
        super().__init__(dtype, device, quantization, ranks)
        self._decode_kernel = decode_kernel
        self._graph_sizes = graph_sizes
        self._use_tqdm = use_tqdm
        self._attention: CudaAttention | None = None

    def _coded_linear(
        self,
        weight: QuantisedWeight,
        bias: torch.Tensor | None,
        activation: Activation,
        split: Split,
        num_outputs: int,
    ) -> TorchLinear:
        coded = CodedWeight.of(weight, self.device)
        return CudaCodedLinear(coded.codes, bias, activation, split, num_outputs, coded=coded)

    def embed(
        self,
        table: torch.Tensor | TorchLinear,
        ids: torch.Tensor,
        offset: int = 0,
        add_to: CudaValue | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return super().embed(table, ids, offset, None if add_to is None else plain(add_to), scale)

    def rms_norm(  # type: ignore[override]
        self, x: CudaValue, weight: torch.Tensor, eps: float, residual: CudaValue | None = None
    ) -> CudaValue:
        if residual is None:
            return Normed(plain(x), weight, eps)
        # No other operation needs the residual stream: see Ops.rms_norm.
        stream = plain(residual)
        return rms_norm(plain(x), weight, eps, out=stream, residual=stream)

    def layer_norm(
        self, x: CudaValue, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return layer_norm(plain(x), weight, bias, eps)

    def linear(self, x: CudaValue, weight: TorchLinear, residual: CudaValue | None = None) -> torch.Tensor:
        stream = None if residual is None else plain(residual)
        rows = x.x if isinstance(x, Normed) else x
        if self._adapters_of(weight, len(rows)) is not None:
            return super().linear(plain(x), weight, stream)
        if self._ranks and weight.split is not Split.NONE:
            return self._across_ranks(self._ranks, own_part(x, weight), weight, stream)
        return own_part(x, weight, stream)

    def _across_ranks(
        self, ranks: TorchRanks, part: torch.Tensor, weight: TorchLinear, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if weight.split is Split.INPUTS:
            ranks.sum_in_place(part)
            return part if residual is None else residual.add_(part)
        return ranks.join(part)[:, : weight.num_outputs]

    def expert_weights(self, spec: ExpertsSpec, take: TakeExpert) -> CudaExperts:  # type: ignore[override]
        return stack_experts(spec, take, self.quantization, self.dtype, self.device)

    def mix_experts(  # type: ignore[override]
        self, x: CudaValue, logits: torch.Tensor, experts: CudaExperts, residual: CudaValue
    ) -> torch.Tensor:
        spec, stream = experts.spec, plain(residual)
        ranks = self._ranks if spec.is_split else None
        # With several ranks, each mixes its part, and the sum over ranks is added to the residual.
        mixed = torch.zeros_like(stream) if ranks else stream
        swiglu = (spec.swiglu.alpha, spec.swiglu.limit) if spec.swiglu else None
        pieces = (torch.split(each, MIXED_AT_ONCE) for each in (plain(x), logits, mixed))
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
        if ranks is None:
            return stream
        ranks.sum_in_place(mixed)
        return stream.add_(mixed)

    def attention(
        self, qkv: torch.Tensor, spec: AttentionSpec, projected: Projected | None = None
    ) -> torch.Tensor:
        if self._attention is None:
            raise RuntimeError("attention can only be called by the functions given to compile")
        out = self._attention(qkv, spec, projected)
        return self._running().output_rows(out) if spec.outputs_only else out

    def outputs(self, x: CudaValue) -> torch.Tensor:
        return self._running().output_rows(plain(x))

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
            # `truncate` has divided by the temperature.
            temperature = (temperature > 0).float()
        return sample(logits, self._send(keys), temperature)

    def _upload(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._send(torch.tensor(values, dtype=dtype))

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        """Sends from pinned memory, because a copy from other memory waits for everything launched before."""
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
            raise ValueError("bind_cache must be called before compile")
        attention = self._attention = CudaAttention(self._cache, step, self._decode_kernel, self._groups)
        self._step = step

        step.send = receive

        def run_step() -> torch.Tensor:
            attention.begin()
            return plain(forward(step))

        def run_final(hidden: torch.Tensor) -> torch.Tensor:
            if final_states is None:
                raise RuntimeError("compiled without final_states")
            return plain(final_states(hidden))

        model = CudaModel(run_step, lambda hidden: plain(logits(hidden)), argmax, step, max_rows, run_final)
        if self._graph_sizes and not is_trial:
            self._capture(model, step)
        return model

    def _capture(self, model: CudaModel, step: StepInputs) -> None:
        assert self._cache is not None
        shapes = decode_shapes(self._graph_sizes, step)
        if self.device.type != "cuda":
            # Nothing can be captured here, but steps are padded all the same.
            step.ladder = Ladder(shapes + chunk_shapes(step, self._cache))
            return
        if has_flash_attention(self.device, self.dtype):
            shapes += chunk_shapes(step, self._cache)
        model.capture(shapes, self._use_tqdm)
