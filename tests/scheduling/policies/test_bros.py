"""The rules of BROS, each on an example with costs that can be reckoned in the head."""

from __future__ import annotations

from unittest.mock import ANY

from msgspec.structs import replace

from alignedserve.kv.end_copies import Checkpoint, Restore
from alignedserve.kv.held import NO_BLOCK
from alignedserve.scheduling.policies.bros import BASE_SIZE
from alignedserve.timing.deadlines import Deadlines
from tests.scheduling.policies.instance import LIMITS, Instance, decoding, document, job, key, keys, prompt
from tests.works import make_work


def test_best_effort_has_the_time_that_the_most_urgent_has_left() -> None:
    instance = Instance("bros")
    instance.runs(*(job() for _ in range(30)), loose := decoding(0.05), tight := decoding(0.03))
    # 10 ms and 20 decodes
    plan = instance.iterate()
    assert plan.run[:2] == keys(tight, loose) and len(plan.run) == 20


def test_best_effort_replaces_who_has_most_time_left() -> None:
    """There is time for ten decodes, and real time has as many."""
    instance = Instance("bros")
    loose = [decoding(0.5 + 0.1 * index) for index in range(9)]
    instance.runs(tight := decoding(0.02), *loose, *(jobs := [job(), job()]))
    assert instance.iterate().run == keys(tight, *loose[:7], *jobs)


def test_best_effort_replaces_nobody_who_would_be_late_then() -> None:
    """After another iteration of 20 ms those have less than it takes."""
    instance = Instance("bros")
    loose = [decoding(0.039) for _ in range(9)]
    instance.runs(tight := decoding(0.02), *loose, job())
    assert instance.iterate().run == keys(tight, *loose)


def test_who_can_not_be_in_time_goes_behind_who_can() -> None:
    instance = Instance("bros")
    instance.runs(late := decoding(0.02), early := decoding(0.1))
    assert instance.iterate(now=0.05).run == keys(early, late)


def test_where_none_can_be_in_time_all_real_time_runs_and_nothing_that_slows_it() -> None:
    instance = Instance("bros")
    instance.runs(job(), *(late := [decoding(0.005), decoding(0.006)]))
    assert instance.iterate(now=0.004).run == keys(*late)


def test_who_finds_no_blocks_does_not_stop_others() -> None:
    instance = Instance("bros", replace(LIMITS, num_blocks=10, max_model_len=160))
    instance.runs(*(running := [decoding(0.5, 60), decoding(0.5, 60)]))
    instance.waits(prompt(60, first_due_s=0.2))
    plan = instance.iterate()
    assert plan.run == keys(*running) and not plan.new_prompts


def test_a_prompt_counts_as_the_iterations_that_it_needs() -> None:
    """Of two that are due alike the longer goes first."""
    instance = Instance("bros", replace(LIMITS, max_num_batched_tokens=64))
    instance.schedule.took(0.05)
    instance.waits(short := prompt(60, first_due_s=1.0), long := prompt(150, first_due_s=1.0))
    plan = instance.iterate()
    assert plan.chunks == [(key(long), 64)] and key(short) not in plan.run


def test_a_prompt_for_which_there_is_no_time_as_a_whole_is_computed_in_part() -> None:
    """In 60 ms, 10 of which any iteration takes and 1 the decode, are three blocks; also of one that is late."""
    for due_s in (100.0, -1.0):
        instance = Instance("bros")
        instance.runs(tight := decoding(0.06))
        instance.waits(long := prompt(200, first_due_s=due_s))
        plan = instance.iterate()
        assert plan.run == keys(tight) and plan.chunks == [(key(long), 48)]


def test_a_document_is_computed_as_far_as_real_time_leaves_time() -> None:
    instance = Instance("bros")
    instance.runs(tight := decoding(0.06))
    instance.waits(first := document(200), document(200))
    plan = instance.iterate()
    assert plan.run == keys(tight) and plan.chunks == [(key(first), 48)]


def test_a_prompt_waits_if_there_is_no_time_for_a_block_of_it() -> None:
    instance = Instance("bros")
    instance.runs(tight := decoding(0.026))
    instance.waits(prompt(200))
    plan = instance.iterate()
    assert plan.run == keys(tight) and not plan.new_prompts


def test_best_effort_whose_kv_is_quickly_there_goes_first() -> None:
    instance = Instance("bros")
    instance.runs(decoding(0.1), here := job())
    instance.waits(far := job(num_tokens=120), near := job(num_tokens=60))
    plan = instance.iterate()
    # fetching 60 tokens takes 60 ms, and 120 more would take too long
    assert key(here) in plan.run and [key(work) for work in plan.pulls] == keys(near)
    assert key(far) not in plan.run


def test_a_batch_doubles_while_there_is_time_and_falls_back_when_there_is_not() -> None:
    instance = Instance("bros", replace(LIMITS, num_blocks=2000, max_num_seqs=400))
    instance.runs(*(job() for _ in range(300)), tight := decoding(0.03))
    assert len(instance.iterate().run) == 20
    # With these it would take 36 ms.
    instance.waits(late := prompt(25))
    assert key(late) not in instance.iterate().run
    for each in (tight, late):
        instance.schedule.abort(key(each))
    assert [len(instance.iterate().run) for _ in range(2)] == [2 * BASE_SIZE, 300]


def test_real_time_without_room_has_the_best_effort_with_least_kv_leave() -> None:
    instance = Instance("bros", replace(LIMITS, num_blocks=11, max_model_len=160))
    instance.runs(job(num_tokens=60), small := job(num_tokens=20), decoding(0.5))
    instance.waits(prompt(60))
    assert instance.iterate().wants_evicted == keys(small)


def test_best_effort_without_room_has_nobody_leave() -> None:
    instance = Instance("bros", replace(LIMITS, num_blocks=10, max_model_len=160))
    instance.runs(job(num_tokens=60), job(num_tokens=60))
    instance.waits(document(60))
    plan = instance.iterate()
    assert not plan.wants_evicted and not plan.new_prompts


def test_what_running_requests_need_next_is_no_room_for_others() -> None:
    """The five free blocks are enough for the document alone."""
    instance = Instance("bros", replace(LIMITS, num_blocks=10, max_model_len=160))
    instance.runs(running := job(num_tokens=79))
    instance.iterate()
    instance.waits(document(70))
    plan = instance.iterate()
    assert plan.run == keys(running) and not plan.new_prompts


def test_who_is_first_is_fetched_even_if_that_takes_too_long() -> None:
    """120 ms, of the 100 that it has."""
    instance = Instance("bros")
    instance.waits(late := decoding(0.1, 120))
    assert [key(work) for work in instance.schedule.plan(0.0).pulls] == keys(late)


# ---- blocks shared from both ends ------------------------------------------------------------------------------------

# Of 10 blocks of 16.
SMALL = replace(LIMITS, num_blocks=10, max_model_len=160)


def test_real_time_that_finds_no_block_uses_what_best_effort_leaves_free() -> None:
    """Of two jobs with 5 blocks one has 11 tokens in its last block, and the other one 5: that is lent first."""
    instance = Instance("bros", SMALL, max_parts=4)
    instance.runs(few := job(num_tokens=75), many := job(num_tokens=69))
    instance.waits(chat := prompt(20, first_due_s=1.0))
    plan = instance.iterate()
    assert not plan.wants_evicted and plan.new_prompts == [chat]
    blocks = instance.schedule.blocks
    # It writes 16 tokens over the 5, and 4 beside the 11.
    assert plan.ends == [Checkpoint(key(many), 4, blocks[key(chat)].blocks[0], 0, 5)]
    assert blocks[key(many)].blocks[4] == NO_BLOCK
    assert blocks[key(few)].blocks[4] == blocks[key(chat)].blocks[1]
    assert key(few) in plan.run and key(many) not in plan.run


def test_best_effort_that_finds_no_block_sits_out_while_real_time_is_there() -> None:
    instance = Instance("bros", SMALL, max_parts=4)
    instance.runs(chat := decoding(0.5, 79), full := job(num_tokens=79))
    assert instance.iterate().run == keys(chat, full)
    for _ in range(3):
        plan = instance.iterate()
        assert plan.run == keys(chat) and not plan.wants_evicted
    instance.schedule.blocks.ended(key(chat))
    plan = instance.iterate()
    assert plan.run == keys(full) and plan.ends == [Restore(key(full), 4, ANY, 13, 16)]


def test_of_best_effort_that_is_here_those_with_the_fewest_saved_slots_go_first() -> None:
    """Beside the chat there is time for one decode. Five tokens of the first job are overwritten."""
    instance = Instance("bros", replace(SMALL, num_blocks=12), max_parts=4)
    instance.runs(many := job(num_tokens=69), few := job(num_tokens=71), other := job(num_tokens=30))
    deadlines = Deadlines(is_rt=True, first_due_s=1.0, tbt_s=0.0125)
    instance.waits(chat := make_work(20, output_len=0, num_cached=0, deadlines=deadlines))
    plan = instance.iterate()
    assert plan.ends == [Checkpoint(key(many), 4, ANY, 0, 5)]
    instance.schedule.abort(key(other))
    assert instance.iterate(now=0.5).run == keys(chat, few)
    instance.waits(document(10))
    assert instance.iterate(now=0.6).run == keys(chat, few)
    instance.schedule.abort(key(few))
    plan = instance.iterate(now=0.7)
    assert plan.run == keys(chat, many) and Restore(key(many), 4, ANY, 0, 5) in plan.ends
    assert not plan.new_prompts


def test_best_effort_leaves_when_host_memory_has_no_room() -> None:
    instance = Instance("bros", SMALL, max_parts=1)
    instance.runs(small := job(num_tokens=69), job(num_tokens=79))
    instance.waits(chat := prompt(40, first_due_s=1.0))
    plan = instance.iterate()
    assert not plan.new_prompts and plan.wants_evicted == keys(small)
    assert instance.schedule.blocks.evict(key(small)) and instance.schedule.blocks.evicted(key(small))
    assert instance.iterate().new_prompts == [chat]


def test_real_time_from_the_pool_needs_blocks_of_its_own() -> None:
    instance = Instance("bros", SMALL, max_parts=4)
    instance.runs(small := job(num_tokens=69), job(num_tokens=79))
    instance.waits(decoding(0.5, 20))
    plan = instance.iterate()
    assert plan.wants_evicted == keys(small) and not plan.pulls


def test_without_an_estimate_who_has_least_time_left_goes_first() -> None:
    instance = Instance("bros", cost=None)
    instance.runs(loose := decoding(2.0), tight := decoding(0.5))
    assert instance.iterate().run == keys(tight, loose)
