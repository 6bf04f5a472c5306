"""Answers that are promised to next turns, by the pool's messages in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from alignedserve.kvpool.owners import OwnerTable
from alignedserve.kvpool.pool import Pool, PoolConfig
from alignedserve.kvpool.return_times import FEW, PRIOR_S
from alignedserve.protocol.messages import Commit, ForgetAll, MakeSpare, Release, Reserve, Reserved
from alignedserve.types import RequestKey
from tests.kvpool.allocator_steps import BLOCK_SIZE, hashes_of

NUM_BLOCKS = 32
MINE, OTHERS = "mine", "others"


class Chats:
    """A pool, and requests of chats of which the names are prompts: see `hashes_of`."""

    def __init__(self, promised_share: float = 0.25, table: OwnerTable | None = None) -> None:
        config = PoolConfig(promised_share=promised_share)
        self.pool = Pool(table or OwnerTable.plain(NUM_BLOCKS), BLOCK_SIZE, 0.0, config)
        self._key = 0

    def reserve(
        self, hashes: Sequence[bytes], now: float, is_optional: bool = False, **fields: Any
    ) -> tuple[RequestKey, Reserved]:
        """Room for these blocks, and for a token more if it is a prompt."""
        self._key += 1
        key, num_tokens = RequestKey(self._key), len(hashes) * BLOCK_SIZE + (not is_optional)
        asked = Reserve(key, num_tokens, hashes=[*hashes], is_optional=is_optional, **fields)
        (reserved,) = self.pool.on(asked, now)
        assert isinstance(reserved, Reserved)
        return key, reserved

    def end(self, hashes: Sequence[bytes], now: float, awaits: str = "tool", owner: str = MINE) -> bool:
        """An answer ends, and is kept. Returns whether there was room."""
        key, reserved = self.reserve(hashes, now, is_optional=True, awaits=awaits, owner=owner)
        if reserved.blocks is not None:
            self.pool.on(Commit(key, len(hashes) * BLOCK_SIZE, now, is_candidate=False), now)
        self.pool.on(Release([key]), now)
        self.pool.check()
        return reserved.blocks is not None

    def come(self, hashes: Sequence[bytes], now: float, follows: str = "tool", owner: str = MINE) -> int:
        """A prompt comes and goes again. Returns the number of blocks that were found."""
        key, reserved = self.reserve(hashes, now, follows=follows, owner=owner)
        assert reserved.blocks is not None
        self.pool.on(Release([key]), now)
        self.pool.check()
        return reserved.num_found // BLOCK_SIZE

    def num_found(self, hashes: Sequence[bytes], now: float, owner: str = MINE) -> int:
        return self.come([*hashes, b"next".ljust(32)], now, follows="", owner=owner)

    def flood(self, num_chats: int, now: float, num_blocks: int = 5, owner: str = MINE) -> None:
        for number in range(num_chats):
            self.end(hashes_of(f"flood {self._key} {number}"[::-1], num_blocks), now, awaits="", owner=owner)

    @property
    def promises(self) -> dict[str, int]:
        return self.pool.use.promises


def hashes(name: str, num_blocks: int = 6) -> list[bytes]:
    return hashes_of(name, num_blocks)


def test_what_is_promised_outlasts_what_was_used_later() -> None:
    for awaits, num_left in (("tool", 6), ("user", 6), ("", 0)):
        chats = Chats()
        chats.end(hashes("a"), now=0.0, awaits=awaits)
        chats.flood(20, now=1.0)
        assert chats.num_found(hashes("a"), now=1.0) == num_left


def test_an_expired_promise_is_like_none() -> None:
    chats = Chats()
    chats.end(hashes("a"), now=0.0)
    chats.flood(1, now=1.0)
    chats.pool.tick(PRIOR_S["tool"] - 0.1)
    assert chats.pool.use.num_promised_blocks == 6
    chats.pool.tick(PRIOR_S["tool"])
    assert chats.pool.use.num_promised_blocks == 0 and chats.promises == {"expired": 1}
    chats.flood(20, now=11.0)
    assert chats.num_found(hashes("a"), now=11.0) == 0


def test_a_next_turn_finds_what_it_was_promised_and_its_time_counts() -> None:
    chats = Chats()
    for number in range(FEW):
        said = hashes(f"{chr(65 + number)}")
        chats.end(said, now=100.0 * number)
        chats.flood(20, now=100.0 * number)
        assert chats.come([*said, b"result".ljust(32)], now=100.0 * number + 3.0) == 6
        chats.pool.tick(100.0 * number + 50.0)
    assert chats.promises == {"kept": FEW}
    chats.end(hashes("z"), now=900.0)
    chats.pool.tick(902.9)
    assert chats.pool.use.num_promised_blocks == 6
    chats.pool.tick(903.0)
    assert chats.pool.use.num_promised_blocks == 0


def test_times_are_also_learned_from_answers_that_were_dropped() -> None:
    chats = Chats()
    for number in range(FEW):
        begun_s, said = 100.0 * number, hashes(f"{chr(65 + number)}")
        chats.end(said, now=begun_s)
        chats.pool.tick(begun_s + PRIOR_S["tool"])
        chats.flood(20, now=begun_s + 20.0)
        assert chats.come([*said, b"result".ljust(32)], now=begun_s + 40.0) == 0
    assert chats.promises == {"expired": FEW}
    chats.end(hashes("z"), now=900.0)
    chats.pool.tick(939.9)
    assert chats.pool.use.num_promised_blocks == 6


def test_running_requests_take_what_is_promised_when_nothing_else_is_left() -> None:
    chats = Chats()
    chats.end(hashes("a"), now=0.0)
    chats.flood(1, now=1.0)
    spare, _ = chats.reserve(hashes("b", 4), now=1.0)
    chats.pool.on(Commit(spare, 17, 0.0, is_candidate=False), 1.0)
    chats.pool.on(MakeSpare([spare]), 1.0)
    key, reserved = chats.reserve(hashes("c", 25), now=2.0)
    assert reserved.dropped == [spare] and chats.pool.use.num_promised_blocks == 6
    more, reserved = chats.reserve(hashes("d", 3), now=3.0)
    assert reserved.blocks is not None
    chats.pool.check()
    # The end of the promised chat has gone, and the rest of it goes first from now on.
    chats.pool.on(Release([key, more]), 3.0)
    assert chats.come([*hashes("a"), b"result".ljust(32)], now=4.0) == 2
    assert chats.promises == {"broken": 1}


@pytest.mark.parametrize("promised_s", [0.0, 20.0])
def test_a_chat_with_forks_loses_its_end_first(promised_s: float) -> None:
    """Forks cut its run, and each part goes after what follows it."""
    chats, said = Chats(promised_share=0.5), hashes("a" * 12, 12)
    chats.end(said, now=0.0)
    chats.pool.tick(promised_s)
    for fork in (4, 8):
        chats.end(said[:fork], now=promised_s)
        chats.come([*said[:fork], b"fork".ljust(32)], now=promised_s, follows="")
    chats.pool.tick(promised_s + 2 * PRIOR_S["tool"])
    key, reserved = chats.reserve(hashes("b", 20), now=50.0)
    assert reserved.blocks is not None
    chats.pool.check()
    chats.pool.on(Release([key]), 50.0)
    # 21 of 32 blocks were needed, and 20 were free.
    assert chats.num_found(said, now=51.0) == 11


def test_a_promised_chat_with_forks_loses_its_end_first() -> None:
    chats, said = Chats(promised_share=0.5), hashes("a" * 12, 12)
    chats.end(said, now=0.0)
    for fork in (4, 8):
        chats.come([*said[:fork], b"fork".ljust(32)], now=1.0, follows="")
    for needed in (20, 21, 24, 29):
        key, reserved = chats.reserve(hashes(f"b{needed}", needed), now=2.0)
        assert reserved.blocks is not None
        chats.pool.check()
        assert chats.pool.use.num_promised_blocks in (0, 4, 8)
        chats.pool.on(Release([key]), 2.0)


def test_an_answer_takes_nothing_that_is_promised() -> None:
    chats = Chats()
    assert chats.end(hashes("a"), now=0.0)
    chats.reserve(hashes("b", 22), now=1.0)
    # 3 blocks are free, and 6 are promised.
    assert not chats.end(hashes("c", 4), now=2.0) and not chats.end(hashes("d", 9), now=2.0)
    assert chats.end(hashes("e", 3), now=2.0) and chats.num_found(hashes("a"), now=2.0) == 6


def test_a_key_and_all_keys_have_limits() -> None:
    chats = Chats(promised_share=0.25)
    names = ("a", "b", "c", "d", "e")
    for name, owner in zip(names, (MINE, MINE, OTHERS, OTHERS, "third"), strict=True):
        chats.end(hashes(name), now=0.0, owner=owner)
    # 8 blocks of 32 for each owner, and 16 for all.
    assert chats.pool.use.num_promised_blocks == 12 and chats.promises == {"refused": 3}
    chats.end(hashes("f", 4), now=0.0, owner="third")
    assert chats.pool.use.num_promised_blocks == 16
    for owner in (MINE, OTHERS, "third"):
        chats.flood(20, now=1.0, owner=owner)
    assert [chats.num_found(hashes(name), now=1.0) for name in names] == [6, 0, 6, 0, 0]
    chats.pool.tick(PRIOR_S["tool"])
    chats.end(hashes("b"), now=20.0, owner=MINE)
    assert chats.pool.use.num_promised_blocks == 6


def test_common_blocks_count_once_and_for_as_long_as_one_needs_them() -> None:
    chats = Chats()
    chats.end(hashes("aaaab", 5), now=0.0)
    chats.end(hashes("aaaac", 5), now=5.0)
    chats.end(hashes("aaaad", 5), now=6.0)
    assert chats.pool.use.num_promised_blocks == 7
    chats.pool.tick(10.0)
    assert chats.pool.use.num_promised_blocks == 6
    chats.flood(20, now=10.0)
    assert chats.num_found(hashes("aaaab", 5), now=10.0) == 4
    assert chats.num_found(hashes("aaaac", 5), now=10.0) == 5


def test_another_owner_changes_nothing() -> None:
    chats = Chats()
    for number in range(FEW + 1):
        theirs = hashes(chr(65 + number), 3)
        chats.end(theirs, now=0.0, owner=OTHERS)
        chats.come([*theirs, b"result".ljust(32)], now=0.2, owner=OTHERS)
    chats.pool.tick(5.0)
    chats.end(hashes("a"), now=10.0)
    chats.flood(20, now=11.0)
    chats.pool.tick(10.0 + PRIOR_S["tool"] - 0.1)
    assert chats.num_found(hashes("a"), now=19.0) == 6
    assert chats.pool.use.num_promised_blocks == 6


def test_a_killed_pool_has_the_blocks_and_no_promises() -> None:
    table = OwnerTable.plain(NUM_BLOCKS)
    chats = Chats(table=table)
    chats.end(hashes("a"), now=0.0)
    again = Chats(table=table)
    again.pool.check()
    assert (again.pool.use.num_kept_blocks, again.pool.use.num_promised_blocks) == (6, 0)
    assert again.num_found(hashes("a"), now=1.0) == 6
    again.flood(20, now=2.0)
    assert again.num_found(hashes("a"), now=2.0) == 0


def test_an_answer_that_is_not_saved_is_not_promised() -> None:
    chats = Chats()
    key, _ = chats.reserve(hashes("a"), 0.0, is_optional=True, awaits="tool", owner=MINE)
    chats.pool.on(Release([key]), 1.0)
    assert chats.pool.on(Reserve(key, 24), 2.0)
    chats.pool.on(Commit(key, 24, 0.0), 2.0)
    assert chats.pool.use.num_promised_blocks == 0 and not chats.promises


@pytest.mark.parametrize("is_listed", [False, True])
def test_wrong_kv_is_promised_no_more(is_listed: bool) -> None:
    chats = Chats()
    chats.end(hashes("a"), now=0.0)
    key, _ = (
        chats.reserve([*hashes("a"), b"next".ljust(32)], now=1.0) if is_listed else (RequestKey(99), None)
    )
    chats.pool.on(ForgetAll(1), 2.0)
    chats.pool.check()
    chats.pool.on(Release([key]), 3.0)
    chats.pool.check()
    assert chats.pool.num_free_blocks == NUM_BLOCKS and chats.pool.use.num_promised_blocks == 0


# ---- shares ----


def test_a_flood_of_one_owner_pushes_out_its_own_blocks() -> None:
    chats = Chats()
    chats.end(hashes("a"), now=0.0, awaits="")
    chats.end(hashes("b"), now=0.0, awaits="")
    chats.flood(20, now=1.0, owner=OTHERS)
    assert [chats.num_found(hashes(name), now=1.0) for name in "ab"] == [6, 6]
    chats.flood(20, now=2.0)
    assert [chats.num_found(hashes(name), now=2.0) for name in "ab"] == [0, 0]


def test_who_has_most_makes_room_for_who_has_little() -> None:
    chats = Chats()
    chats.flood(20, now=0.0, owner=OTHERS)
    for name in "abc":
        chats.end(hashes(name, 4), now=1.0, awaits="")
    assert [chats.num_found(hashes(name, 4), now=1.0) for name in "abc"] == [4, 4, 4]


def test_stale_blocks_of_an_owner_with_few_do_not_cost_another_one_its_spare() -> None:
    """They are older than the spare, so kept blocks go before it: those of the owner that has most."""
    chats = Chats()
    chats.end(hashes("a", 4), now=0.0, awaits="", owner="few")
    spare, _ = chats.reserve(hashes("b", 4), now=1.0, owner="spare")
    chats.pool.on(Commit(spare, 17, 1.0, is_candidate=False), 1.0)
    chats.pool.on(MakeSpare([spare]), 1.0)
    for number in range(20):
        key, reserved = chats.reserve(hashes_of(f"{number} flood", 5), now=2.0, owner=OTHERS)
        assert reserved.blocks is not None and not reserved.dropped
        chats.pool.on(Commit(key, 5 * BLOCK_SIZE, 2.0, is_candidate=False), 2.0)
        chats.pool.on(Release([key]), 2.0)
        chats.pool.check()
    assert chats.num_found(hashes("a", 4), now=3.0, owner="few") == 4
    chats.pool.on(Release([spare]), 3.0)


def test_the_order_of_one_owners_blocks_does_not_depend_on_the_others() -> None:
    """The blocks used last stay, and ends of prompts go first."""
    chats = Chats()
    chats.end(hashes("a"), now=0.0, awaits="")
    chats.flood(20, now=1.0, owner=OTHERS)
    for name in "bcd":
        chats.end(hashes(name), now=2.0, awaits="")
    found = [chats.num_found(hashes(name), now=3.0) for name in "abcd"]
    assert found == sorted(found) and found[-1] == 6


def test_what_a_new_pool_finds_goes_by_age() -> None:
    """It does not know whose it is: as a share, it would stay for ever."""
    table = OwnerTable.plain(NUM_BLOCKS)
    chats = Chats(table=table)
    for name in "abcde":
        chats.end(hashes(name), now=0.0, awaits="")
    again = Chats(table=table)
    assert again.num_found(hashes("a"), now=1.0) == 6
    again.flood(4, now=2.0)
    assert again.num_found(hashes("a"), now=2.0) == 6
    again.flood(20, now=3.0)
    assert [again.num_found(hashes(name), now=3.0) for name in "abcde"] == [0, 0, 0, 0, 0]
    again.pool.check_idle()


def test_what_follows_blocks_that_a_new_pool_finds_has_the_owner_of_its_request() -> None:
    """The request that takes them has their hashes, so they are its owner's."""
    table = OwnerTable.plain(NUM_BLOCKS)
    Chats(table=table).end(hashes("a"), now=0.0, awaits="")
    again = Chats(table=table)
    again.end([*hashes("a"), *hashes("b", 4)], now=1.0, awaits="")
    again.flood(20, now=2.0, owner=OTHERS)
    assert again.num_found([*hashes("a"), *hashes("b", 4)], now=3.0) == 10


def test_a_request_that_a_new_pool_finds_gets_its_owner_when_it_grows() -> None:
    table = OwnerTable.plain(NUM_BLOCKS)
    chats = Chats(table=table)
    key, _ = chats.reserve(hashes("a"), now=0.0, owner=MINE)
    chats.pool.on(Commit(key, 6 * BLOCK_SIZE, 0.0, is_candidate=False), 0.0)
    again = Chats(table=table)
    again._key = key
    found = Reserve(key, 8 * BLOCK_SIZE, hashes=hashes("a"), owner=MINE)
    assert again.pool.on(found, 1.0)
    again.pool.on(Release([key]), 1.0)
    again.pool.check()
    again.flood(20, now=2.0, owner=OTHERS)
    assert again.num_found(hashes("a"), now=3.0) == 6


def test_a_part_that_no_request_lists_stays_without_an_owner() -> None:
    table = OwnerTable.plain(NUM_BLOCKS)
    Chats(table=table).end(hashes("a"), now=0.0, awaits="")
    again = Chats(table=table)
    assert again.num_found(hashes("a")[:3], now=1.0) == 3
    again.flood(20, now=2.0, owner=OTHERS)
    assert again.num_found(hashes("a"), now=3.0) == 3
    again.pool.check_idle()
