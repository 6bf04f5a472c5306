"""The demo model: small tasks with checkable answers, and the model in this repository that does them."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
