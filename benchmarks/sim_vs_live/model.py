"""The served models: the demo model, and one with iterations as long as a GPU's.

On a fast processor, the demo model's iterations are shorter than a message between two processes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve import demo

# The larger model's differences from the demo model.
LARGER = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Served:
    name: str
    # The model's location and load options, as parts of a command line.
    options: Sequence[str]
    kv_bytes_per_token: int
    # Real time's objectives between two tokens, in seconds.
    tbt_s: tuple[float, float]
    # Requests per second of the moderate and of the high load.
    rates: tuple[float, float]
    # Seconds between requests that run alone.
    apart_s: float


DEMO = Served("demo", (), 2048, (0.02, 0.1), (8.0, 20.0), 0.2)


def larger(folder: Path) -> Served:
    """Makes the model in `folder`: a config, the demo model's tokenizer, and random weights."""
    for path in demo.MODEL_DIR.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    config = json.loads((demo.MODEL_DIR / "config.json").read_text()) | LARGER
    (folder / "config.json").write_text(json.dumps(config))
    options = (str(folder), "--load-format", "dummy")
    kv_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return Served("larger", options, kv_bytes, (0.05, 0.2), (1.2, 2.0), 0.7)
