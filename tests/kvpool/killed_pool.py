"""Changes the owner table of a segment until it is killed: a byte to stdout after each step. Run by test_segment.py."""

from __future__ import annotations

import os
import sys
from itertools import count
from random import Random

from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.segment import Segment
from tests.kvpool.allocator_steps import BLOCK_SIZE, random_step

if __name__ == "__main__":
    name, seed = sys.argv[1:]
    allocator, dice = BlockAllocator(Segment.attach(name).table, BLOCK_SIZE, deadline_s=0), Random(int(seed))
    for now in count():
        random_step(allocator, dice, now)
        os.write(1, b".")
