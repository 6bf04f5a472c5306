"""Checksums of the pool's blocks, by which a load finds bytes that have changed since they were saved.

Each block has one word beside it in the segment. A save sets it to 0 before the first byte, and to the checksum after
the last one. So if an instance is killed during a save, the block has no checksum, and is not checked. A load reads the
words before its copy, and compares them afterwards. If a word has changed meanwhile, another save has written the
block, and the load compares nothing.

A block that was found to be wrong is marked. No load uses it until it is saved again, whatever the sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alignedserve.transport.runs import Run

Words = NDArray[np.uint64]

# A word is a checksum of 32 bits and these marks; 0: no checksum.
_IS_SET, _IS_WRONG = 1 << 32, 1 << 33
# Words of 8 bytes in a row. It is prime, so that equal rows of values that repeat at powers of two do not cancel out.
_ROW_LEN = 509
# The constants of splitmix64.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def checksum(data: NDArray[np.uint8]) -> int:
    """Returns the CRC-32 of the data's rows, combined by XOR, and of what is left over.

    It finds every single flipped bit, and all changes within 4 KB. XOR is as fast as a copy; a CRC of everything would
    take four times as long."""
    num_bytes = len(data) // (8 * _ROW_LEN) * 8 * _ROW_LEN
    rows = data[:num_bytes].view(np.uint64).reshape(-1, _ROW_LEN)
    return zlib.crc32(data[num_bytes:].data, zlib.crc32(np.bitwise_xor.reduce(rows, axis=0).data))


def are_drawn(blocks: NDArray[np.int64], number: int, share: float) -> NDArray[np.bool_]:
    """Returns which of the blocks a load with this number checks: each with a probability of `share`."""
    mixed = blocks.astype(np.uint64) + np.uint64(number * _STEP & (1 << 64) - 1)
    for factor, shift in ((_STEP, 30), (_FIRST, 27), (_SECOND, 31)):
        mixed *= np.uint64(factor)
        mixed ^= mixed >> np.uint64(shift)
    are: NDArray[np.bool_] = mixed >> np.uint64(11) < share * (1 << 53)
    return are


@dataclass(slots=True)
class Checked:
    """What a load has checked."""

    num_blocks: int = 0
    # Blocks that no load has found before, and all that are wrong, in the order of the load.
    changed: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)


class BlockChecks:
    def __init__(self, blocks: NDArray[np.uint8], words: Words, share: float) -> None:
        """`words` has one entry for each of these blocks. With a `share` of 0, saves only remove checksums."""
        self._blocks, self._words, self._share = blocks, words, share

    def clear(self, runs: Sequence[Run]) -> None:
        """Call it before a save writes the blocks."""
        for run in runs:
            self._words[run.there : run.there + run.num_blocks] = 0

    def store(self, runs: Sequence[Run], is_stopped: Callable[[], bool]) -> None:
        """Call it when a save has written all bytes."""
        if not self._share:
            return
        for block in _blocks_of(runs).tolist():
            if is_stopped():
                return
            self._words[block] = _IS_SET | checksum(self._blocks[block])

    def draw(self, runs: Sequence[Run], number: int) -> dict[int, int]:
        """Returns the blocks that a load has to check, with their words. Call it before the load reads them."""
        if not self._share:
            return {}
        blocks = _blocks_of(runs)
        words = self._words[blocks]
        drawn = ((words > 0) & are_drawn(blocks, number, self._share)) | (words >= _IS_WRONG)
        return dict(zip(blocks[drawn].tolist(), words[drawn].tolist(), strict=True))

    def check(self, drawn: dict[int, int], is_stopped: Callable[[], bool]) -> Checked:
        """Compares the drawn blocks. Call it when a load has read all bytes."""
        checked = Checked()
        for block, word in drawn.items():
            if is_stopped():
                break
            if not word & _IS_WRONG:
                checked.num_blocks += 1
                if _IS_SET | checksum(self._blocks[block]) == word:
                    continue
                now = int(self._words[block])
                if now & ~_IS_WRONG != word:
                    # Another save has written the block.
                    continue
                if now == word:
                    self._words[block] = word | _IS_WRONG
                    checked.changed.append(block)
            checked.wrong.append(block)
        return checked


def _blocks_of(runs: Sequence[Run]) -> NDArray[np.int64]:
    return np.array([run.there + i for run in runs for i in range(run.num_blocks)], np.int64)
