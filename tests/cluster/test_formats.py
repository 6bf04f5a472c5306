"""KV of every format as processes move it, and requests with adapters: whatever dies, tokens are those of an engine
alone, and the pool holds the bytes that are meant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from alignedserve.kv.groups import STATE_WINDOW, LayerGroups
from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.process import segments
from alignedserve.kvpool.segment import Segment
from alignedserve.types import InstanceId
from tests.cluster.client import Stream, connected
from tests.cluster.conftest import Borrow, Scenes
from tests.cluster.history import History
from tests.cluster.processes import COLOCATED, DECODES, MAX_BLOCKS, POOL, PREFILLS, ROUTER
from tests.cluster.requests import alone, known_requests
from tests.cluster.scene import Scene

Options = dict[str, Any]
Victims = Sequence[InstanceId]

pytestmark = pytest.mark.slow


def case(link: str, *victims: InstanceId, one_in: int = 2, **options: Any) -> Any:
    """`link`: "colocated" where there is one instance, which has none. `one_in`: its share of the runs."""
    made: Options = {"num_colocated": 1} if link == "colocated" else {"link": link}
    name = "-".join([*(str(value) for value in options.values()), link, *victims])
    return pytest.param(made | options, victims, id=name, marks=pytest.mark.drawn(one_in=one_in))


def kill_in_turn(scene: Scene, victims: Victims) -> History:
    """Returns what happened: something was evicted, and the pool has blocks of the format that is meant."""
    scene.kill_in_turn(victims)
    processes = scene.processes
    (name,) = segments(processes.segment_prefix)
    segment = Segment.attach(name)
    assert segment.form == processes.setup.form.in_pool(processes.setup.pool_kv_dtype)
    assert segment.blocks.any()
    segment.close()
    history = scene.history()
    assert history.evicted.total()
    return history


def check_evicted(scene: Scene, history: History) -> None:
    """What a colocated instance has in the pool is what it had to evict."""
    assert history.evicted[COLOCATED if scene.processes.setup.num_colocated else DECODES[0]]


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        case("ipc", DECODES[0], PREFILLS[0], kv_cache_dtype="int8"),
        case("gloo", PREFILLS[1], DECODES[1], kv_cache_dtype="fp8"),
        case("host", DECODES[0], DECODES[1], kv_cache_dtype="int8"),
        case("colocated", COLOCATED, kv_cache_dtype="fp8"),
    ],
)
def test_in_8_bits(scenes: Scenes, options: Options, victims: Victims) -> None:
    scene = scenes(**options)
    assert scene.processes.setup.form.encoding != "kv"
    check_evicted(scene, kill_in_turn(scene, victims))


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        case("ipc", DECODES[0], PREFILLS[0]),
        case("colocated", COLOCATED, kv_cache_dtype="fp8"),
        case("gloo", PREFILLS[1], DECODES[1]),
        case("host", DECODES[0], DECODES[1]),
    ],
)
def test_layers_with_a_window_beside_others(scenes: Scenes, options: Options, victims: Victims) -> None:
    """Blocks move by groups of layers, and what is behind the window does not."""
    span = KvSpan(block_size=16, window=24, max_step=1, num_full_groups=1, num_sliding_groups=2)
    scene = scenes(
        "ministral",
        head_dim=24,
        num_groups=span.num_groups,
        span=span,
        num_decode_blocks=MAX_BLOCKS,
        **options,
    )
    kill_in_turn(scene, victims)
    # The next router goes by what the pool says, and the pool by what instances keep.
    said = {
        (hello.role, hello.limits.window, hello.fingerprint["window"])
        for hello in History(scene.processes.logs).hellos
        if "window" in hello.fingerprint
    }
    assert {(window, text) for _, window, text in said} == {(24, "24")}
    assert {role for role, _, _ in said} >= {"kvpool", victims[0].split("-")[0]}


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        case("ipc", DECODES[0], PREFILLS[0]),
        case("host", POOL, ROUTER, one_in=3),
        case("gloo", PREFILLS[1], DECODES[1], one_in=3),
        case("colocated", COLOCATED, one_in=3),
    ],
)
def test_layers_with_a_state(scenes: Scenes, options: Options, victims: Victims) -> None:
    """A made-up kind of layer (`layer_with_state.py`): its state moves where KV would."""
    groups = LayerGroups((), 1, num_full=1, num_sliding=2, window=STATE_WINDOW, has_state=True)
    span = KvSpan.of(groups, block_size=16, max_step=1)
    scene = scenes(
        "fading-sum", num_groups=span.num_groups, span=span, num_decode_blocks=MAX_BLOCKS, **options
    )
    kill_in_turn(scene, victims)
    hellos = [hello for hello in History(scene.processes.logs).hellos if "window" in hello.fingerprint]
    assert "kvpool" in {hello.role for hello in hellos}
    limits = [hello.limits for hello in hellos]
    assert {(each.window, each.tile_tokens, each.has_state) for each in limits} == {(STATE_WINDOW, 1, True)}


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        case("ipc", DECODES[0], PREFILLS[1], one_in=3),
        case("colocated", COLOCATED, one_in=3),
        case("ipc", POOL, ROUTER, one_in=3),
        case("host", DECODES[0], one_in=6),
        case("host", PREFILLS[0], one_in=6),
    ],
)
def test_requests_with_adapters(
    scenes: Scenes, lora_modules: tuple[str, ...], options: Options, victims: Victims
) -> None:
    kill_in_turn(scenes(lora_modules=lora_modules, **options), victims)


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        case("host", POOL, DECODES[1], one_in=4),
        case("colocated", COLOCATED, one_in=4),
        case("ipc", DECODES[0], one_in=4),
        case("host", DECODES[0], one_in=4),
    ],
)
def test_a_pool_in_8_bits(scenes: Scenes, options: Options, victims: Victims) -> None:
    """Tokens may differ, and nothing else does."""
    scene = scenes(pool_kv_dtype="int8", **options)
    assert scene.processes.configs[POOL].form.encoding == "kv-int8"
    check_evicted(scene, kill_in_turn(scene, victims))


@pytest.mark.drawn(one_in=2)
def test_answers_from_a_pool_in_8_bits_are_close_to_the_engine_s(borrow: Borrow) -> None:
    """The first token was computed before any KV was in the pool. The later ones stand on KV that is nearly right: for
    a random model, whose logits are close together, most are the same."""
    processes = borrow(pool_kv_dtype="int8", link="host")
    requests = known_requests()

    async def generate() -> list[Stream]:
        async with connected(processes) as client:
            return await client.generate(requests, at_once=4, every=20)

    streams = asyncio.run(generate())
    expected = [result.tokens for result in alone(processes.setup.directory, requests)]
    assert [stream.tokens[0] for stream in streams] == [tokens[0] for tokens in expected]
    pairs = [
        pair
        for stream, tokens in zip(streams, expected, strict=True)
        for pair in zip(stream.tokens, tokens, strict=True)
    ]
    assert sum(ours == theirs for ours, theirs in pairs) > 0.5 * len(pairs)
