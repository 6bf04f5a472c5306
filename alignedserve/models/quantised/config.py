"""How a checkpoint is quantised: what its config.json says."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A layer pattern with this prefix is a regular expression.
REGEX = "re:"


@dataclass(frozen=True)
class QuantisedConfig:
    """How a checkpoint stores quantised linear layers."""

    # The name in config.json, such as gptq.
    method: str
    # One of alignedserve.models.quantised.layers.LAYOUTS: the tensors of a layer, and the order of codes in them.
    layout: str
    # One of alignedserve.kernels.quantised: int4, int8, fp8 or mxfp4. For a GGUF file: all its types.
    kind: str
    # Inputs per scale; None: all inputs of an output.
    group: int | None
    # Outputs per scale; None: all.
    num_outputs: int | None = 1
    has_zeros: bool = False
    # Added to the stored zeros.
    zero_offset: int = 0
    # Whether there is a scale for a layer's inputs. Our kernels don't use it.
    has_input_scales: bool = False
    # Whether layers without a bias may store one of zeros.
    has_empty_biases: bool = False
    # Names of layers, or patterns of them. Without targets, all layers are quantised.
    targets: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def has(self, layer: str) -> bool:
        """Whether the layer of this name is quantised. Embedding tables are not."""
        if layer.endswith("embed_tokens"):
            return False
        is_target = not self.targets or any(_matches(each, layer) for each in self.targets)
        return is_target and not any(_matches(each, layer) for each in self.ignored)


def _matches(pattern: str, layer: str) -> bool:
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), layer) is not None
    # Also matches a name without its prefix, and the name of a whole module.
    return f".{pattern}." in f".{layer}."
