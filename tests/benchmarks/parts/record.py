from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def options() -> argparse.Namespace:
    """Returns the options that every part gets, and --look FILE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--look", type=Path)
    return parser.parse_args()


def write(out: Path, *rows: dict[str, Any]) -> None:
    whole = out / "whole"
    whole.write_text(json.dumps({"device": "none", "command": "a part", "rows": rows}))
    whole.replace(out / "gpu.json")
