"""An island whose model has layers that attend to all tokens and others that slide: its instances count blocks of
groups of layers, and the pool counts whole columns."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from alignedserve.protocol.messages import (
    Commit,
    FormBatch,
    Hello,
    Offer,
    Rejected,
    Release,
    Reserve,
    Stage,
    Stored,
    Submit,
)
from alignedserve.scheduling.proportion import Proportion, Seen
from alignedserve.types import PoolBlockId
from tests.router.script import DECODE, GATEWAY, ONE, POOL, PREFILL, Script, hello, prefill_report, request

# One group attends to all tokens, and two to the latest eight.
GROUPS = {"window": 8, "num_full_groups": 1, "num_sliding_groups": 2}


def island(num_blocks: int = 300, num_pool_blocks: int = 100, **options: Any) -> Script:
    script = Script(connect=False, **options)
    script.connect(POOL, num_blocks=num_pool_blocks)
    for name in (PREFILL, DECODE):
        script.connect(name, num_blocks=num_blocks, **GROUPS)
    script.connect(GATEWAY)
    script.take()
    return script


@pytest.mark.parametrize(("num_blocks", "num_pool_blocks"), [(62, 100), (300, 20)])
def test_a_request_is_refused_if_its_columns_fit_no_memory(num_blocks: int, num_pool_blocks: int) -> None:
    script = island(num_blocks, num_pool_blocks)
    script.submit(num_prompt=70, max_tokens=11)
    assert "need 21 blocks of KV, and there are at most 20" in script.take_one(Rejected, GATEWAY).message
    script.submit(num_prompt=70, max_tokens=10)
    assert script.take_one(Reserve, POOL).key == ONE


def test_what_is_offered_is_promised_its_blocks_and_those_of_a_column_more() -> None:
    script = island()
    script.pooled(num_prompt=120, max_tokens=10)
    script.take()
    script.chosen(1)
    assert [work.request.key for work in script.take_one(Offer, DECODE).works] == [ONE]
    view = script.router.state.cluster.decode(DECODE)
    # It has 121 tokens in 31 columns; the tile of the first token that the next one sees begins with 64.
    assert view and view.batch == {ONE: 31 + 2 * (31 - 16) + 3}
    assert view.num_available_blocks == view.num_free_blocks - 64


def test_a_batch_may_have_the_longest_request() -> None:
    script = island(num_blocks=150, batch_share=0.01)
    script.pooled(num_prompt=30)
    asked = next(message for _, message in script.take() if isinstance(message, FormBatch))
    # Of 200 tokens all 50 columns in one group, and in two those of a window, the rest of a tile and a column in part.
    assert asked.max_blocks == 50 + 2 * (-(-(8 + 62 + 1) // 4) + 1)


@pytest.mark.parametrize(("num_staging_blocks", "kind"), [(30 + 2 * 14, Stage), (30 + 2 * 14 - 1, Offer)])
def test_what_is_staged_takes_the_blocks_that_are_copied(num_staging_blocks: int, kind: type[Any]) -> None:
    script = island(link="gloo")
    script.close(PREFILL)
    script.connect(PREFILL, epoch=2, num_blocks=300, num_staging_blocks=num_staging_blocks, **GROUPS)
    script.say(PREFILL, prefill_report(num_free_blocks=300))
    script.pooled(num_prompt=120, max_tokens=10)
    script.chosen(1)
    found = [message for _, message in script.take() if isinstance(message, Stage | Offer)]
    assert [type(message) for message in found] == [kind]
    if kind is Stage:
        stager = script.router.state.cluster.prefill(PREFILL)
        assert stager and not stager.num_free_staging_blocks


# After 135 tokens the next one attends to those from 128 on, and the tiles before are passed; before that, a tile less.
@pytest.mark.parametrize(("num_delivered", "num_cached"), [(38, 137), (36, 135), (35, 0)])
def test_a_new_router_goes_on_with_no_kv_of_which_the_window_was_not_saved(
    num_delivered: int, num_cached: int
) -> None:
    """The one before had it evicted after 137 tokens, and not all of them reached the gateway."""
    script = Script(connect=False)
    for name in (PREFILL, DECODE):
        script.connect(name, num_blocks=300, **GROUPS)
    script.connect(GATEWAY)
    blocks = [PoolBlockId(block) for block in range(35)]
    script.connect(POOL, window=8, inventory=[Stored(ONE, blocks, 137)])
    submitted = Submit(request(num_prompt=100, max_tokens=100), delivered=[50] * num_delivered)
    script.say(GATEWAY, submitted)
    assert script.state().num_cached == num_cached
    sent = [message for _, message in script.take()]
    assert (Release([ONE]) in sent) == (num_cached == 0)
    asked = [message.num_tokens for message in sent if isinstance(message, Reserve)]
    assert asked == [num_cached or 100 + num_delivered]


def test_patience_and_roles_go_by_what_requests_hold_where_they_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room for three requests of 120 tokens, and for 232 tokens of which nothing is passed."""
    seen: list[Seen] = []
    monkeypatch.setattr(Proportion, "wanted", lambda self, new: seen.append(new))
    script = island(num_blocks=3 * (30 + 2 * 14), starvation_s=1.0, change_roles=True)
    script.pooled(num_prompt=119)
    commits = [message for _, message in script.take() if isinstance(message, Commit)]
    assert commits[-1].due_s == pytest.approx(1.0 + 120 / 360)
    script.tick(1.0)
    assert (seen[-1].decoding.num_tokens, seen[-1].decoding.max_tokens) == (120, 360)


@pytest.mark.parametrize(
    "wrong", [{"num_sliding_groups": 0}, {"num_full_groups": -1, "num_sliding_groups": 1}, {"window": -1}]
)
def test_groups_that_no_model_has_are_no_message(wrong: dict[str, Any]) -> None:
    encoded = msgspec.msgpack.encode(hello(DECODE, **wrong))
    with pytest.raises(msgspec.ValidationError, match="`int` >= "):
        msgspec.msgpack.decode(encoded, type=Hello)
