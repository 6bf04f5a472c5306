"""Changes a segment's ledger until it is killed; a byte to standard output after each step. Run by test_segment.py."""

from __future__ import annotations

import os
import sys
from itertools import count
from random import Random

from alignedserve.kvpool.ledger import Ledger
from alignedserve.kvpool.segment import Segment
from tests.kvpool.ledger_steps import BLOCK_SIZE, random_step

if __name__ == "__main__":
    name, seed = sys.argv[1:]
    ledger, dice = Ledger(Segment.attach(name).table, BLOCK_SIZE, deadline_s=0), Random(int(seed))
    for now in count():
        random_step(ledger, dice, now)
        os.write(1, b".")
