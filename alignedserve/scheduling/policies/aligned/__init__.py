"""The parts of AlignedServe's own policy (`policies/default.py`)."""
