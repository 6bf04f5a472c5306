"""Sliding windows listed in a Hugging Face config.json."""

from __future__ import annotations

from alignedserve.models.fields import Fields


def listed_windows(fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Returns each layer's window, from `layer_types`."""
    types = fields.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} entries, one per layer")
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if any(kind not in allowed for kind in types):
        raise fields.error("layer_types", f"a list of {' or '.join(allowed)} if sliding_window is {window}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
