from __future__ import annotations

import mmap
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from alignedserve.kernels.kv_int8 import dequantise_torch, quantise_torch
from alignedserve.kv.format import BlockFormat
from alignedserve.transport import cuda
from alignedserve.transport.completions import Completions
from alignedserve.transport.copiers import GROUP_BYTES
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import KVSender
from alignedserve.transport.mover import Mover, PoolBlocks
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import BlockId, Epoch, InstanceId
from tests.transport.helpers import KEY, Outcomes, block_ids, bytes_of, filled_blocks, identity, pairs
from tests.transport.peers import SEED, Peer, Staged

MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_blocks_go_to_pinned_memory_and_back_after_what_was_computed_before() -> None:
    cache = torch.zeros((4, MIB // 4), device="cuda")
    pool = np.frombuffer(mmap.mmap(-1, 8 * MIB), np.uint8).reshape(8, MIB)
    completions, outcomes = Completions(), Outcomes()
    mover = Mover([cache], PoolBlocks(pool), Epoch(1), completions)
    for _ in range(1000):
        cache += 1.0
    mover.save(KEY, pairs((0, 5), (2, 7)), outcomes.append)
    assert completions.run(timeout_s=30) == 1
    cache.zero_()
    mover.load(KEY, pairs((1, 7)), outcomes.append)
    assert completions.run(timeout_s=30) == 1
    mover.close()
    assert outcomes.errors == [None, None]
    assert (pool[[5, 7]].view(np.float32) == 1000.0).all() and not pool[6].any()
    assert cache[1].eq(1000.0).all() and not cache[[0, 2, 3]].any()


@pytest.mark.parametrize("can_batch", [True, False])
def test_both_directions_at_once_in_one_call_or_many(
    can_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.DriverCopies, "can_batch", can_batch)
    num_blocks = 2 * GROUP_BYTES // MIB
    cache = torch.randint(0, 1 << 30, (num_blocks, MIB // 4), dtype=torch.int32, device="cuda")
    noise = np.random.default_rng(0).integers(0, 256, (num_blocks, MIB), dtype=np.uint8)
    pool = np.frombuffer(mmap.mmap(-1, num_blocks * MIB), np.uint8).reshape(num_blocks, MIB)
    pool[:] = noise
    before = cache.cpu().numpy().view(np.uint8)
    order = np.random.default_rng(1).permutation(num_blocks).tolist()
    half = num_blocks // 2
    completions, outcomes = Completions(), Outcomes()
    mover = Mover([cache], PoolBlocks(pool), Epoch(1), completions)
    mover.save(KEY, pairs(*enumerate(order[:half])), outcomes.append)
    mover.load(KEY, pairs(*enumerate(order[half:], start=half)), outcomes.append)
    while len(outcomes) < 2:
        assert completions.run(timeout_s=30)
    mover.close()
    assert outcomes.errors == [None, None]
    after = cache.cpu().numpy().view(np.uint8)
    assert np.array_equal(pool[order[:half]], before[:half])
    assert np.array_equal(pool[order[half:]], noise[order[half:]])
    assert np.array_equal(after[half:], noise[order[half:]])
    assert np.array_equal(after[:half], before[:half])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_are_quantised_on_the_way_to_the_pool_and_restored_on_the_way_back(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = BlockFormat(num_layers=4, block_size=16, num_kv_heads=4, head_dim=64, dtype=dtype)
    stored = form.in_pool("int8")
    # five groups
    monkeypatch.setattr("alignedserve.transport.int8_copiers.BUFFER_BYTES", 4 * stored.block_bytes)
    cache = torch.randn((18, *form.shape), device="cuda", dtype=getattr(torch, dtype))
    expected = torch.zeros((18, stored.block_bytes), dtype=torch.uint8)
    quantise_torch(cache.cpu(), expected, num_last_slots=5)
    cache[-1, ..., 5:, :] = torch.nan
    pool = np.frombuffer(mmap.mmap(-1, 20 * stored.block_bytes), np.uint8).reshape(20, stored.block_bytes)
    order = np.random.default_rng(1).permutation(20)[:18].tolist()
    completions, outcomes = Completions(), Outcomes()
    mover = Mover([cache], PoolBlocks(pool, stored), Epoch(1), completions)
    mover.save(KEY, pairs(*enumerate(order)), outcomes.append, num_empty=11)
    assert completions.run(timeout_s=60) == 1
    apart = np.abs(pool[order].astype(int) - expected.numpy().astype(int))
    # where a value is as far from one code as from the next
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01

    wanted = torch.empty_like(cache, device="cpu")
    dequantise_torch(torch.from_numpy(pool[order]), wanted)
    cache.zero_()
    mover.load(KEY, pairs(*enumerate(order)), outcomes.append)
    assert completions.run(timeout_s=60) == 1
    mover.close()
    assert outcomes.errors == [None, None]
    torch.testing.assert_close(cache.cpu(), wanted)


def send_on_gpu(pipe: Connection, staged: Staged) -> None:
    # small ones share what the allocator has from the driver: then the blocks do not begin it
    beside = torch.ones(2 * MIB, dtype=torch.uint8, device="cuda")
    blocks = filled_blocks(staged.num_blocks, staged.block_bytes, SEED).cuda()
    staging_buffer = StagingBuffer(Epoch(1), Completions())
    for key, ids in staged.requests.items():
        staging_buffer.put(key, ids, lambda _: None)
    sender = KVSender("ipc", [blocks], staging_buffer, identity("prefill-0"))
    pipe.send(sender.address)
    pipe.recv()
    sender.close()
    pipe.send((len(staging_buffer), bool(beside.all())))


@pytest.mark.parametrize("num_blocks", [3, 2 * GROUP_BYTES // MIB])
def test_ipc_moves_blocks_between_two_processes_on_one_gpu(num_blocks: int) -> None:
    order = [BlockId(block) for block in np.random.default_rng(1).permutation(num_blocks).tolist()]
    ours = torch.zeros((num_blocks + 1, MIB), dtype=torch.uint8, device="cuda")
    completions, outcomes = Completions(), Outcomes()
    with Peer(send_on_gpu, Staged("ipc", num_blocks, MIB, {KEY: order})) as peer:
        receiver = KVReceiver("ipc", [ours], identity("decode-0"), completions)
        specs = [(KEY, block_ids(*range(num_blocks)))]
        receiver.pull(InstanceId("prefill-0"), peer.receive(), specs, outcomes.append, timeout_s=60)
        assert completions.run(timeout_s=60) == 1
        assert outcomes.errors == [None]
        receiver.close()
        assert peer.end() == (0, True)
    theirs = bytes_of(filled_blocks(num_blocks, MIB, SEED))
    assert np.array_equal(ours[:num_blocks].cpu().numpy(), theirs[order])
    assert not ours[num_blocks].any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices")
def test_nccl_moves_several_requests_between_two_gpus() -> None:
    theirs = torch.rand((8, MIB // 4), device="cuda:0")
    ours = torch.zeros((8, MIB // 4), device="cuda:1")
    completions, outcomes = Completions(), Outcomes()
    staging_buffer = StagingBuffer(Epoch(1), completions)
    staging_buffer.put(KEY, block_ids(3, 1, 2), outcomes.append)
    sender = KVSender("nccl", [theirs], staging_buffer, identity("prefill-0"))
    receiver = KVReceiver("nccl", [ours], identity("decode-0"), completions)
    specs = [(KEY, block_ids(0, 6, 7))]
    receiver.pull(InstanceId("prefill-0"), sender.address, specs, outcomes.append, timeout_s=60)
    while len(outcomes) < 2:
        assert completions.run(timeout_s=60)
    receiver.close()
    sender.close()
    assert outcomes.errors == [None, None]
    assert torch.equal(ours[[0, 6, 7]].cpu(), theirs[[3, 1, 2]].cpu())
