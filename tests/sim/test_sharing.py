"""Decode instances in virtual time: they hold once what requests have in common, and a copy costs what it moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.kvpool.pool import Pool
from alignedserve.protocol.messages import DecodeReport, Request
from alignedserve.router import pool_client
from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.island import SimIsland
from alignedserve.sim.model import make_request, prompt_of
from tests.sim.islands import BLOCK_SIZE, COST, every_policy, limits, play, small_island

NUM_BLOCKS = 400
NUM_LINES, NUM_COMMON, NUM_OWN = 8, 160, 40
# Of output, where few are evicted.
NUM_SHORT = 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "apart": {},
    "pulled": {"link": "nccl", "num_prefill": 2},
    "colocated": {"num_prefill": 0, "num_decode": 0, "num_colocated": 1},
}
ROOMY: dict[str, Any] = {"prefill": limits(num_blocks=NUM_BLOCKS), "decode": limits(num_blocks=NUM_BLOCKS)}


@dataclass
class Reports:
    all: list[DecodeReport] = field(default_factory=list)

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        if isinstance(event, Received) and isinstance(event.message, DecodeReport):
            self.all.append(event.message)

    def num_bytes(self, what: str) -> int:
        return sum(moved.num_bytes for each in self.all for moved in each.moved if moved.what == what)

    @property
    def most_in_use(self) -> int:
        return NUM_BLOCKS - min(each.num_free_blocks for each in self.all)

    @property
    def most_running(self) -> int:
        return max(each.num_running for each in self.all)


def lines(every_s: float) -> list[Request]:
    plain = [
        make_request(key, NUM_COMMON + NUM_OWN, 200, arrival_s=every_s * key, tier="be")
        for key in range(1, NUM_LINES + 1)
    ]
    return [replace(each, prompt=[7] * NUM_COMMON + [each.key] * NUM_OWN) for each in plain]


def run(every_s: float, **options: Any) -> tuple[SimIsland, Reports]:
    island, reports = small_island("fcfs", **ROOMY | options), Reports()
    island.router.observers.append(reports)
    return play(island, lines(every_s)), reports


@pytest.mark.parametrize("every_s", [0.0, 0.5], ids=["together", "one after the other"])
@pytest.mark.parametrize(("link", "what"), [("host", "load"), ("nccl", "pull")])
def test_a_copy_moves_what_is_missing(link: str, what: str, every_s: float) -> None:
    island, shared = run(every_s, link=link, enable_prefix_caching=True)
    _, plain = run(every_s, link=link)
    form = island.decodes[0].engine.format
    block_bytes = form.block_bytes if what == "pull" else form.pool_block_bytes
    num_blocks = NUM_LINES * -(-(NUM_COMMON + NUM_OWN) // BLOCK_SIZE)
    assert plain.num_bytes(what) == num_blocks * block_bytes
    num_skipped = (NUM_LINES - 1) * (NUM_COMMON // BLOCK_SIZE)
    assert shared.num_bytes(what) == (num_blocks - num_skipped) * block_bytes
    assert sum(each.num_not_copied for each in shared.all) == num_skipped * BLOCK_SIZE
    assert not any(each.num_not_copied for each in plain.all)


def test_lines_that_begin_alike_run_together_however_they_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are twelve prefixes, and the decode instance has room for two of them and some lines."""

    def num_loaded_bytes() -> int:
        mixed = [
            replace(
                make_request(key, NUM_COMMON + NUM_OWN, NUM_SHORT, arrival_s=0.0, tier="be"),
                prompt=[7 + key % 12] * NUM_COMMON + [key] * NUM_OWN,
            )
            for key in range(1, 49)
        ]
        num_own = -(-(NUM_OWN + NUM_SHORT) // BLOCK_SIZE)
        few = limits(num_blocks=2 * NUM_COMMON // BLOCK_SIZE + 8 * num_own)
        island, reports = (
            small_island("aligned", **ROOMY | {"decode": few}, enable_prefix_caching=True),
            Reports(),
        )
        island.router.observers.append(reports)
        play(island, mixed)
        return reports.num_bytes("load")

    together = num_loaded_bytes()
    monkeypatch.setattr(pool_client, "prefix_group", lambda hashes: 0)
    # Neither does the pool see that more of them fit if they have blocks in common.
    monkeypatch.setattr(Pool, "_tail_of", None)
    assert together < 0.8 * num_loaded_bytes()


def test_what_they_have_in_common_takes_its_room_once() -> None:
    (_, shared), (_, plain) = run(0.0, enable_prefix_caching=True), run(0.0)
    assert shared.most_running == plain.most_running == NUM_LINES
    num_own = -(-(NUM_OWN + 200) // BLOCK_SIZE)
    assert shared.most_in_use <= NUM_COMMON // BLOCK_SIZE + NUM_LINES * num_own < plain.most_in_use


@every_policy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_get_their_tokens_in_little_memory(policy: str, layout: str) -> None:
    """Prompts of both classes with some beginnings in common. Each token is checked, and its KV."""
    dice = Random(11)
    asked = []
    for key in range(1, 41):
        prompt_len, tier = dice.randint(20, 300), dice.choice(("rt", "be"))
        prompt = prompt_of(key, prompt_len, [dice.randrange(3)])
        prompt[dice.randint(1, prompt_len) :] = []
        prompt += [key % 200] * (prompt_len - len(prompt))
        asked.append(
            make_request(key, prompt_len, dice.randint(5, 120), key * 0.02, prompt=prompt, tier=tier)
        )
    island, reports = (
        small_island(
            policy,
            decode=limits(num_blocks=40),
            enable_prefix_caching=True,
            pool_blocks=400,
            **LAYOUTS[layout],
        ),
        Reports(),
    )
    island.router.observers.append(reports)
    play(island, asked)
    assert layout == "colocated" or any(each.num_not_copied for each in reports.all)


def test_attention_to_what_they_have_in_common_takes_its_time_once() -> None:
    """Of the same lines on the same devices: one reads for each request, and the other one reads once."""
    slow = replace(COST, decode_attention_s=1e-4)

    def seconds(saving: float, **options: Any) -> float:
        cost = replace(slow, shared_saving=saving)
        return run(0.0, cost=cost, **options)[0].now

    each, half, once = (seconds(saving, enable_prefix_caching=True) for saving in (0.0, 0.5, 1.0))
    assert each > 1.2 * half > 1.2 * once
    # Where nothing is shared, nothing is saved.
    assert seconds(0.0) == seconds(1.0)


def test_a_decode_instance_predicts_what_it_takes() -> None:
    cost = replace(COST, decode_attention_s=1e-4, shared_saving=0.9)
    _, reports = run(0.0, cost=cost, enable_prefix_caching=True)
    assert [each.pace for each in reports.all] == pytest.approx([1.0] * len(reports.all), abs=0.01)
