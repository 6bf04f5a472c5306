"""Random steps for allocators, the same for the same dice, and what is allowed to be found after one was cut off."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from random import Random
from typing import NamedTuple

from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.owners import AllocationState
from alignedserve.types import RequestKey

BLOCK_SIZE = 4
PATIENCE_S = 6


class Record(NamedTuple):
    blocks: tuple[int, ...]
    num_tokens: int
    state: AllocationState


def records(allocator: BlockAllocator) -> dict[RequestKey, Record]:
    return {
        each.key: Record(tuple(each.blocks), each.num_tokens, each.state) for each in allocator.allocations
    }


def hashes_of(name: str, num_blocks: int) -> list[bytes]:
    """The hashes of a prompt's blocks. Prompts have those in common of the letters that both names begin with."""
    letters = name.ljust(num_blocks, ".")[:num_blocks]
    return [sha256(letters[:end].encode()).digest() for end in range(1, num_blocks + 1)]


def known(allocator: BlockAllocator) -> dict[int, bytes]:
    """The blocks that are known, each with its hash."""
    return {int(block): block_hash for block, block_hash in allocator.known.items()}


def random_prompt(key: RequestKey) -> Sequence[bytes]:
    """The same for a key: few prompts, most of which begin alike."""
    return hashes_of(("", "aaa", "aa", "aaab", "a", "b", "aab")[key], (0, 3, 4, 5, 2, 6, 4)[key])


def random_step(allocator: BlockAllocator, dice: Random, now: float) -> None:
    key = RequestKey(dice.randint(1, 6))
    num_tokens = dice.randint(1, allocator.num_blocks * BLOCK_SIZE // 3)
    steps = ("reserve", "reserve", "reserve", "commit", "commit", "commit", "spare", "release", "release")
    match dice.choice((*steps, "lapse", "forget") if dice.random() < 0.5 else steps):
        case "reserve":
            is_optional = num_tokens % 5 == 0
            owner = "ab"[key % 2]
            grant = allocator.reserve(
                key, num_tokens, now + PATIENCE_S, random_prompt(key), is_optional, owner
            )
            assert not (is_optional and grant and grant.dropped)
        case "lapse" if num_tokens % 2:
            num_free = allocator.num_free_blocks
            assert not allocator.find(key, num_tokens, now + PATIENCE_S, random_prompt(key)).dropped
            assert allocator.num_free_blocks == num_free
        case "commit":
            allocator.commit(key, num_tokens)
        case "spare":
            allocator.make_spare(key)
        case "release":
            allocator.release(key)
        case "lapse":
            allocator.lapse(now)
        case "forget":
            if num_tokens % 4 == 0:
                allocator.forget_all()


def assert_between(
    found: dict[RequestKey, Record], before: dict[RequestKey, Record], after: dict[RequestKey, Record]
) -> None:
    """Every request is as it was before the step or as it is after it, or some of each; never less."""
    for key in found.keys() | before.keys() | after.keys():
        allowed = [before.get(key), after.get(key)]
        here, there = found.get(key), [record for record in allowed if record]
        if here is None:
            assert None in allowed, f"request {key} is lost: {allowed}"
            continue
        assert here.blocks in [record.blocks for record in there], (key, here, allowed)
        assert here.num_tokens in [record.num_tokens for record in there], (key, here, allowed)
        assert here.state in [record.state for record in there], (key, here, allowed)
        assert len(here.blocks) * BLOCK_SIZE >= here.num_tokens
