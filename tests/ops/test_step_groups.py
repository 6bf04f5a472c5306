"""The inputs of a step with grouped layers: slots and blocks of each group."""

from __future__ import annotations

import numpy as np
import pytest

from alignedserve.ops.step import StepInputs
from alignedserve.ops.step_shape import Ladder, StepShape


def filled(is_compact: bool, num_groups: int) -> StepInputs:
    step = StepInputs(max_tokens=15, max_seqs=4, max_blocks_per_seq=5, num_groups=num_groups)
    if is_compact:
        be_as_on_a_gpu(step)
    host = step.host
    host.token_ids[:6], host.positions[:6] = range(10, 16), [7, 0, 1, 2, 3, 4]
    host.slots[:, :6] = np.arange(6 * num_groups).reshape(num_groups, 6) + 20
    host.outputs[:2], host.query_start[:3], host.context_len[:2] = [0, 5], [0, 1, 6], [8, 5]
    host.is_reversed[:2] = 0
    step.host_block_table(2, 3)[:] = np.arange(2 * num_groups * 3).reshape(2, num_groups, 3)
    step.commit(6, 2, 2)
    return step


def be_as_on_a_gpu(step: StepInputs) -> None:
    """Rows of the table are as wide as a step needs where the device has a buffer of its own."""
    step._device_buffer = step._device_buffer[:]


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("is_compact", [False, True])
def test_each_group_has_slots_and_blocks_of_its_own(is_compact: bool, num_groups: int) -> None:
    step = filled(is_compact, num_groups)
    flat, stride = step.flat_block_table, int(step.table_stride)
    assert stride == (3 if is_compact else 5)
    for group in range(num_groups):
        assert step.slots[group, :6].tolist() == list(range(20 + 6 * group, 26 + 6 * group))
        # Kernels are compiled for it.
        assert step.slots[group].data_ptr() % 16 == 0
        for seq in range(2):
            row = seq * num_groups + group
            begin = row * stride
            expected = [3 * row, 3 * row + 1, 3 * row + 2]
            assert flat[begin : begin + 3].tolist() == expected
            assert step.block_table_of(group)[seq, :3].tolist() == expected
    sent = flat.data_ptr() - step._device_buffer.data_ptr() + 4 * 2 * num_groups * stride
    assert step.host.num_used[0] * 4 == sent


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("is_compact", [False, True])
def test_other_ranks_unpack_all_groups(is_compact: bool, num_groups: int) -> None:
    ours = filled(is_compact, num_groups)
    theirs = StepInputs(max_tokens=15, max_seqs=4, max_blocks_per_seq=5, num_groups=num_groups)
    theirs.host.slots[:] = 77
    if is_compact:
        be_as_on_a_gpu(theirs)
    assert len(ours.packed()) == 4 * (4 + (2 + num_groups) * 6 + 2 * 2 + 2 + 3 + 2 * num_groups * 3)
    theirs.unpack(ours.packed())
    assert theirs.shape == ours.shape and theirs.packed() == ours.packed()
    assert np.array_equal(theirs.host.slots[:, :6], ours.host.slots[:, :6])
    assert (theirs.host.slots[:, 6:] == 77).all()
    assert np.array_equal(theirs.host.block_table, ours.host.block_table)


def test_padding_writes_nothing_in_any_group() -> None:
    step = filled(is_compact=False, num_groups=3)
    step.host.slots[:, 6:] = 77
    step.ladder = Ladder([StepShape(9, 4, 4, 4, 9, 20, 40)])
    step.commit(6, 2, 2)
    assert (step.slots[:, 6:9] == -1).all() and (step.slots[:, 9:] == 77).all()
    assert (step.slots[:, :6] >= 20).all()
