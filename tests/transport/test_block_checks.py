"""Blocks of the pool that change after they were saved: loads find them, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from alignedserve.kv.format import BlockFormat
from alignedserve.transport.block_checks import BlockChecks, Words, are_drawn, checksum
from alignedserve.transport.completions import Completions, Outcome
from alignedserve.transport.mover import Mover, PoolBlocks
from alignedserve.transport.runs import Run, merge
from alignedserve.types import Epoch
from tests.transport.helpers import KEY, Outcomes, bytes_of, filled_blocks, pairs

NUM_BLOCKS, BLOCK_BYTES = 6, 8192
ALL = [(block, block) for block in range(NUM_BLOCKS)]
Bytes = NDArray[np.uint8]


class Rig:
    """A mover, and the memory that it shares with others."""

    def __init__(
        self, parts: list[torch.Tensor], pool: Bytes, words: Words, share: float, form: BlockFormat | None
    ) -> None:
        self.pool, self.words = pool, words
        self.completions = Completions()
        self.checks = BlockChecks(pool, self.words, share)
        self.mover = Mover(parts, PoolBlocks(pool, form, self.checks), Epoch(1), self.completions)

    def save(self, *places: tuple[int, int]) -> Outcome:
        outcomes = Outcomes()
        self.mover.save(KEY, pairs(*places), outcomes.append)
        assert self.completions.run(timeout_s=30) == 1
        return outcomes.only

    def load(self, *places: tuple[int, int]) -> Outcome:
        outcomes = Outcomes()
        self.mover.load(KEY, pairs(*places), outcomes.append)
        assert self.completions.run(timeout_s=30) == 1
        return outcomes.only

    def flip(self, block: int, at: int = 5000) -> None:
        self.pool[block, at] ^= 16


@contextmanager
def rig_of(
    share: float = 1.0,
    parts: list[torch.Tensor] | None = None,
    pool: Bytes | None = None,
    form: BlockFormat | None = None,
    words: Words | None = None,
) -> Iterator[Rig]:
    parts = parts or [filled_blocks(NUM_BLOCKS, BLOCK_BYTES, seed=1)]
    pool = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8) if pool is None else pool
    rig = Rig(parts, pool, np.zeros(NUM_BLOCKS, np.uint64) if words is None else words, share, form)
    try:
        yield rig
    finally:
        rig.mover.close()


# ---- pure ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20_000), st.data())
def test_each_flipped_bit_changes_the_checksum(num_bytes: int, data: st.DataObject) -> None:
    content = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    before = checksum(content)
    assert before == checksum(content.copy()) < 1 << 32
    at, bit = data.draw(st.integers(0, num_bytes - 1)), data.draw(st.integers(0, 7))
    content[at] ^= 1 << bit
    assert checksum(content) != before


@given(st.integers(0, 20_000 - 4072), st.binary(min_size=1, max_size=4072))
def test_all_that_is_written_within_a_row_changes_the_checksum(first: int, written: bytes) -> None:
    content = np.zeros(20_000, np.uint8)
    before = checksum(content)
    content[first : first + len(written)] = np.frombuffer(written, np.uint8)
    assert (checksum(content) != before) == any(written)


def test_pages_that_change_places_change_the_checksum() -> None:
    content = np.random.default_rng(0).integers(0, 256, 8 * 4096, dtype=np.uint8)
    other = content.reshape(8, 4096)[[0, 5, 2, 3, 4, 1, 6, 7]].reshape(-1)
    assert checksum(other) != checksum(content)


def test_a_share_of_the_blocks_is_drawn_anew_for_each_load() -> None:
    blocks = np.arange(10_000)
    assert not are_drawn(blocks, 1, 0.0).any() and are_drawn(blocks, 1, 1.0).all()
    for share in (0.01, 0.5):
        assert are_drawn(blocks, 7, share).mean() == pytest.approx(share, rel=0.15)
        assert np.array_equal(are_drawn(blocks, 7, share), are_drawn(blocks, 7, share))
        assert np.mean([are_drawn(blocks[:1], number, share)[0] for number in range(10_000)]) == (
            pytest.approx(share, rel=0.25)
        )
    assert (are_drawn(blocks, 1, 0.5) == are_drawn(blocks, 2, 0.5)).mean() == pytest.approx(0.5, abs=0.05)


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_what_is_as_it_was_saved_is_loaded() -> None:
    with rig_of() as rig:
        assert rig.save(*ALL).num_checked == 0 and rig.words.all()
        outcome = rig.load(*ALL)
    assert (outcome.error, outcome.num_checked, outcome.num_changed) == (None, NUM_BLOCKS, 0)
    assert outcome.wrong_block is None


def test_a_flipped_bit_fails_each_load_until_the_block_is_saved_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rig_of() as rig, caplog.at_level(logging.WARNING):
        rig.save(*ALL)
        rig.flip(3)
        first, again, others = rig.load(*ALL), rig.load((0, 4), (1, 3)), rig.load((0, 4))
        for outcome in (first, again):
            assert (outcome.error, outcome.wrong_block) == ("pool block 3 is not as it was saved", 3)
        # It is counted and logged when it is found.
        assert (first.num_checked, first.num_changed) == (NUM_BLOCKS, 1)
        assert (again.num_checked, again.num_changed) == (1, 0)
        assert others.error is None
        assert [record.getMessage() for record in caplog.records] == [
            "Block 3 of the KV pool has changed since it was saved: it is computed again"
        ]
        rig.save((3, 3))
        assert rig.load(*ALL).error is None


def test_the_first_wrong_block_of_the_request_is_named() -> None:
    with rig_of() as rig:
        rig.save(*ALL)
        for block in (1, 4):
            rig.flip(block)
        assert rig.load((0, 5), (1, 4), (2, 0), (3, 1)).wrong_block == 4


def test_without_a_share_nothing_is_checked_and_saves_remove_checksums() -> None:
    with rig_of() as rig, rig_of(share=0.0, pool=rig.pool, words=rig.words) as plain:
        rig.save(*ALL)
        rig.flip(1)
        outcome = plain.load(*ALL)
        assert (outcome.error, outcome.num_checked) == (None, 0)
        plain.save((2, 1))
        assert rig.words[1] == 0 and np.count_nonzero(rig.words) == NUM_BLOCKS - 1
        # The instance that checks does not blame the other one.
        assert rig.load(*ALL).error is None


def test_only_the_drawn_blocks_are_checked() -> None:
    with rig_of(share=0.5) as rig:
        first = rig.save(*ALL).transfer.number
        for number in range(first + 1, first + 9):
            outcome = rig.load(*ALL)
            assert outcome.transfer.number == number
            assert outcome.num_checked == are_drawn(np.arange(NUM_BLOCKS), number, 0.5).sum()


def test_a_save_that_is_stopped_leaves_no_checksum() -> None:
    with rig_of() as rig:
        rig.save(*ALL)
        outcomes = Outcomes()
        rig.mover.save(KEY, pairs(*ALL), outcomes.append, timeout_s=0.0)
        assert rig.completions.run(timeout_s=30) == 1
        assert outcomes.only.error == "its deadline passed" and not rig.words.any()
        # What is there without a checksum is loaded as it is.
        outcome = rig.load(*ALL)
        assert (outcome.error, outcome.num_checked) == (None, 0)


def test_a_block_that_is_saved_during_a_load_is_not_compared() -> None:
    with rig_of() as rig:
        rig.save(*ALL)
        runs = merge(ALL, BLOCK_BYTES)
        drawn = rig.checks.draw(runs, 1)
        for has_ended in (False, True):
            # The other instance's save has begun, or has ended.
            rig.checks.clear([Run(2, 2, 1)])
            rig.flip(2, at=5000 + has_ended)
            if has_ended:
                rig.checks.store([Run(2, 2, 1)], lambda: False)
            checked = rig.checks.check(drawn, lambda: False)
            assert checked.num_blocks == NUM_BLOCKS and not checked.wrong


def test_two_loads_at_once_both_find_a_changed_block_and_one_counts_it() -> None:
    with rig_of() as rig:
        rig.save(*ALL)
        runs = merge(ALL, BLOCK_BYTES)
        drawn = [rig.checks.draw(runs, number) for number in (1, 2)]
        rig.flip(2, at=5000)
        first, second = (rig.checks.check(each, lambda: False) for each in drawn)
        assert (first.changed, first.wrong) == ([2], [2])
        assert (second.changed, second.wrong) == ([], [2])


def test_a_block_of_several_parts_has_one_checksum() -> None:
    parts = [filled_blocks(NUM_BLOCKS, BLOCK_BYTES // 2, seed) for seed in (1, 2)]
    with rig_of(parts=parts) as rig:
        rig.save(*ALL)
        assert rig.words[2] & 0xFFFFFFFF == checksum(np.concatenate([bytes_of(part)[2] for part in parts]))
        rig.flip(2, at=BLOCK_BYTES - 1)
        assert rig.load(*ALL).wrong_block == 2


def test_blocks_that_are_stored_as_int8_have_checksums_of_what_is_stored() -> None:
    form = BlockFormat(num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
    stored = form.in_pool("int8")
    cache = torch.rand((NUM_BLOCKS, *form.shape))
    pool = np.zeros((NUM_BLOCKS, stored.block_bytes), np.uint8)
    with rig_of(parts=[cache], pool=pool, form=stored) as rig:
        rig.save(*ALL)
        assert rig.load(*ALL).error is None
        rig.flip(5, at=stored.block_bytes - 1)
        assert rig.load(*ALL).wrong_block == 5


def test_the_pool_s_block_is_named_where_layer_groups_have_blocks_of_their_own() -> None:
    form = BlockFormat(1, 16, 2, 16, "float32", num_groups=3)
    pool = np.zeros((NUM_BLOCKS, form.block_bytes), np.uint8)
    parts = [filled_blocks(NUM_BLOCKS, form.block_bytes, seed=1)]
    with rig_of(parts=parts, pool=pool, form=form) as rig:
        rig.save(*ALL)
        rig.flip(4, at=0)
        assert rig.load(*ALL).wrong_block == 1
