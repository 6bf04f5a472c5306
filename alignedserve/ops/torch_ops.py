"""Operations in plain torch, one by one, on any device. The other backends are compared with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from alignedserve.kernels.cpu.sampling import gumbel_argmax_torch
from alignedserve.kernels.quantised import QuantisedWeight, linear_quantised, side_by_side
from alignedserve.kv.groups import LayerGroups, one_group
from alignedserve.ops.adapters import LayerAdapters
from alignedserve.ops.base import (
    Activation,
    AttentionSpec,
    CompiledModel,
    Ops,
    Projected,
    check_groups,
    place_of,
)
from alignedserve.ops.experts import ExpertsSpec, TakeExpert, taken
from alignedserve.ops.quantise import Part, plain_parts, quantised_parts, without_blocks
from alignedserve.ops.ranks import RankGroup
from alignedserve.ops.shard import Split
from alignedserve.ops.states import StateSpec, run_states
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_adapters import TorchAdapters
from alignedserve.ops.torch_attention import paged_attention
from alignedserve.ops.torch_experts import TorchExperts, mix
from alignedserve.ops.torch_inputs import restore
from alignedserve.ops.torch_ranks import TorchRanks


@dataclass(frozen=True)
class TorchLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: Activation
    split: Split = Split.NONE
    # If outputs are split: the number of outputs of all ranks.
    num_outputs: int = 0
    adapters: TorchAdapters | None = None

    @property
    def kind(self) -> str | None:
        """The kind of the weight's codes; None: it is in the dtype."""
        return None

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        return F.linear(x, self.weight, self.bias)

    def outputs_from(self, first: int) -> TorchLinear:
        """The layer with its outputs from `first` on. Shares the memory."""
        self._check_no_adapters()
        return TorchLinear(self.weight[first:], self._bias_from(first), self.activation, self.split)

    def _check_no_adapters(self) -> None:
        if self.adapters is not None:
            raise ValueError("a layer with adapters yields all of its outputs")

    def _bias_from(self, first: int) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[first:]


@dataclass(frozen=True)
class TorchCodedLinear(TorchLinear):
    """A layer with a weight in codes. `weight` is the codes alone."""

    quantised: QuantisedWeight = field(kw_only=True)

    @property
    def kind(self) -> str:
        return self.quantised.kind

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return linear_quantised(x, self.quantised, self.bias).to(x.dtype)

    def outputs_from(self, first: int) -> TorchCodedLinear:
        self._check_no_adapters()
        rows = self.quantised.rows(first, len(self.weight))
        bias = self._bias_from(first)
        return TorchCodedLinear(rows.codes, bias, self.activation, self.split, quantised=rows)


class TorchOps(Ops):
    name = "torch"

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantization: str | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self.dtype = dtype
        self.quantization = quantization
        self.device = torch.device(device)
        self._ranks: TorchRanks | None = None
        if ranks:
            self.shard = ranks.shard
            self._ranks = TorchRanks(ranks.store_file, ranks.shard, self.device)
        self._cache: torch.Tensor | None = None
        self._groups = one_group(0)
        self._step: StepInputs | None = None

    def linear_weight(
        self,
        parts: Sequence[Part],
        biases: Sequence[torch.Tensor] | None = None,
        activation: Activation = Activation.NONE,
        is_head: bool = False,
        split: Split = Split.NONE,
        num_outputs: int = 0,
    ) -> TorchLinear:
        bias = None if biases is None else torch.cat(list(biases)).to(self.device, self.dtype)
        parts = without_blocks(parts, self.dtype)
        if quantised := quantised_parts(parts, self.scheme(is_head), self.dtype):
            return self._coded_linear(side_by_side(quantised), bias, activation, split, num_outputs)
        # Decoded parts are on the CPU.
        weight = torch.cat([part.to(self.device, self.dtype) for part in plain_parts(parts)])
        return TorchLinear(weight, bias, activation, split, num_outputs)

    def _coded_linear(
        self,
        weight: QuantisedWeight,
        bias: torch.Tensor | None,
        activation: Activation,
        split: Split,
        num_outputs: int,
    ) -> TorchLinear:
        """Makes a layer of a weight that has no other owner. The weight may be on another device."""
        moved = weight.to(self.device)
        return TorchCodedLinear(moved.codes, bias, activation, split, num_outputs, quantised=moved)

    def with_adapters(self, weight: TorchLinear, adapters: LayerAdapters) -> TorchLinear:
        return replace(weight, adapters=TorchAdapters.of(adapters, self.dtype, self.device))

    def put_adapter(self, weight: TorchLinear, number: int, adapter: LayerAdapters) -> None:
        assert weight.adapters is not None
        weight.adapters.put(number, TorchAdapters.of(adapter, self.dtype, self.device))

    def parameter(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return tensor.detach().to(device=self.device, dtype=dtype or self.dtype, copy=True).contiguous()

    def bind_cache(self, cache: torch.Tensor, groups: LayerGroups | None = None) -> None:
        self._cache, self._groups = cache, check_groups(cache, groups)

    def embed(
        self,
        table: torch.Tensor | TorchLinear,
        ids: torch.Tensor,
        offset: int = 0,
        add_to: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        if isinstance(table, TorchLinear) and table.kind is not None:
            raise ValueError(f"a table in {table.kind} can't be looked up; give it in the dtype")
        rows = (table.weight if isinstance(table, TorchLinear) else table)[
            ids[: self._running().shape.num_tokens].long() + offset
        ]
        rows = rows if scale == 1.0 else rows * scale
        return rows if add_to is None else add_to + rows

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        out = (normed * weight.float()).to(self.dtype)
        return out if residual is None else residual + out

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def linear(
        self, x: torch.Tensor, weight: TorchLinear, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = weight.project(x)
        if (numbers := self._adapters_of(weight, len(x))) is not None and weight.adapters is not None:
            weight.adapters.add_to(out, x, numbers)
        out = activate(out, weight.activation)
        if self._ranks and weight.split is Split.INPUTS:
            out = self._ranks.sum(out).to(self.dtype)
        elif self._ranks and weight.split is Split.OUTPUTS:
            out = self._ranks.join(out)[:, : weight.num_outputs]
        return out if residual is None else residual + out

    def _adapters_of(self, weight: TorchLinear, num_rows: int) -> torch.Tensor | None:
        """Returns the adapter of each row; None if the layer has none, or no row has one."""
        if weight.adapters is None:
            return None
        adapters = self._running().adapters
        return adapters.of_rows(num_rows) if adapters is not None and adapters.is_any else None

    def expert_weights(self, spec: ExpertsSpec, take: TakeExpert) -> TorchExperts:
        gate_up, down = [], []
        for expert in taken(spec, take):
            gate_up.append(self.linear_weight([expert.gate, expert.up], expert.gate_up_biases))
            down.append(self.linear_weight([expert.down], expert.down_biases))
        return TorchExperts(spec, gate_up, down)

    def mix_experts(
        self, x: torch.Tensor, logits: torch.Tensor, experts: TorchExperts, residual: torch.Tensor
    ) -> torch.Tensor:
        mixed = mix(x, logits, experts)
        if self._ranks and experts.spec.is_split:
            mixed = self._ranks.sum(mixed).to(self.dtype)
        return residual + mixed

    def attention(
        self, qkv: torch.Tensor, spec: AttentionSpec, projected: Projected | None = None
    ) -> torch.Tensor:
        if self._cache is None:
            raise ValueError("bind_cache must be called before attention")
        step = self._running()
        place = place_of(spec.layer, self._groups, step)
        restore(step, self._cache, spec, projected)
        return paged_attention(qkv, self._cache, step, spec, place)

    def state(self, x: torch.Tensor, spec: StateSpec) -> torch.Tensor:
        if self._cache is None:
            raise ValueError("bind_cache must be called before state")
        step = self._running()
        return run_states(x, self._cache, step, spec, place_of(spec.layer, self._groups, step))

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return self._running().output_rows(x)

    def break_up(self) -> None:
        if self._ranks:
            self._ranks.break_up()

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.max(dim=-1)
        return best.indices, ~best.values.isfinite()

    def gumbel_argmax(self, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return gumbel_argmax_torch(logits, keys.to(logits.device))

    def compile(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        step: StepInputs,
        max_rows: int,
        is_trial: bool = False,
        final_states: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> CompiledModel:
        def run_step() -> torch.Tensor:
            self._step = step
            step.upload()
            step.mark_sent()
            return forward(step)

        return TorchModel(run_step, logits, max_rows, final_states)

    def _running(self) -> StepInputs:
        if self._step is None:
            raise RuntimeError(
                "the operations of TorchOps can only be called by the functions given to compile"
            )
        return self._step


class TorchModel(CompiledModel):
    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        max_rows: int,
        final_states: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._final_states = final_states
        self._max_rows = max_rows
        self._hidden: torch.Tensor | None = None

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        self._hidden = self._forward()
        return self._hidden

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._logits(self._rows_of(rows)).float()

    @torch.inference_mode()
    def final_states(self, rows: torch.Tensor) -> torch.Tensor:
        if self._final_states is None:
            raise RuntimeError("compiled without final_states")
        return self._final_states(self._rows_of(rows)).float()

    def _rows_of(self, rows: torch.Tensor) -> torch.Tensor:
        if self._hidden is None:
            raise RuntimeError("rows of hidden states need a forward before them")
        if len(rows) > self._max_rows:
            raise ValueError(f"rows must be at most {self._max_rows}, not {len(rows)}")
        return self._hidden[rows.to(self._hidden.device).long()]


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case Activation.NONE:
            return x
        case Activation.RELU:
            return F.relu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.SILU_GATED:
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        case Activation.GELU_TANH_GATED:
            gate, up = x.chunk(2, dim=-1)
            return F.gelu(gate, approximate="tanh") * up
