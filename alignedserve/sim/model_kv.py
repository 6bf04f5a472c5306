"""The KV of a simulated model. A cost model has the bytes of KV per token, but not their shape, which is in the model's
config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alignedserve.kv.format import DTYPE_BYTES, KV_CACHE_DTYPES, BlockFormat
from alignedserve.kv.groups import LayerGroups, one_group
from alignedserve.timing.cost import CostModel


@dataclass(frozen=True)
class ModelKv:
    name: str
    # The format of an instance's blocks. Only its dtype follows from the bytes in the cost model.
    form: BlockFormat
    # The most tokens of a request.
    max_model_len: int
    # Latest tokens to which a token attends in every layer; 0: all.
    window: int = 0
    # Which KV an instance holds blocks for. Has as many groups as `form`.
    groups: LayerGroups = field(default_factory=lambda: one_group(1))

    def form_of(self, cost: CostModel) -> BlockFormat:
        """Returns the format in which a token has as many bytes as in the cost model. Raises ValueError."""
        forms = {dtype: replace(self.form, dtype=dtype) for dtype in DTYPE_BYTES}
        forms |= {name: self.form_in(name) for name in KV_CACHE_DTYPES if name != "auto"}
        for form in forms.values():
            if int(form.token_bytes) == cost.kv_bytes_per_token:
                return form
        known = ", ".join(f"{int(form.token_bytes)} in {name}" for name, form in forms.items())
        raise ValueError(
            f"cost: is for {cost.kv_bytes_per_token} bytes of KV per token, but {self.name} has {known}: give the cost "
            "model of this model"
        )

    def form_in(self, kv_cache_dtype: str) -> BlockFormat:
        return replace(self.form, encoding=KV_CACHE_DTYPES[kv_cache_dtype])


def with_kv(
    cost: CostModel,
    block_size: int,
    kv_cache_dtype: str = "auto",
    pool_kv_dtype: str = "auto",
    model: ModelKv | None = None,
) -> CostModel:
    """Returns the cost model with KV in these dtypes, and with the model's window. `kv_cache_dtype` auto: as in the
    cost model. Raises ValueError."""
    if model is None:
        if kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype={kv_cache_dtype!r}: needs a model, because its heads determine the bytes per token: "
                "alignedserve simulate MODEL"
            )
        if cost.window:
            raise ValueError(
                f"cost: is for a model with a window of {cost.window} tokens or less in all layers: "
                "alignedserve simulate MODEL"
            )
        # One channel stands for all of them.
        form = BlockFormat(1, block_size, 1, 1, "bfloat16")
    else:
        form = model.form_of(cost)
        if kv_cache_dtype != "auto":
            form = model.form_in(kv_cache_dtype)
            cost = cost.with_kv(int(form.token_bytes))
        cost = cost.with_window(model.window)
    in_pool = form.in_pool(pool_kv_dtype)
    return cost.with_pool(cost.kv_bytes_per_token * in_pool.block_bytes / form.block_bytes)
