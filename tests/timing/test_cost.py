from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.timing.cost import (
    Attention,
    CopyChannel,
    CostModel,
    ExpertCounts,
    HostResources,
    plain_cost,
)
from alignedserve.timing.cost_presets import cost_presets, load_cost_model
from alignedserve.timing.estimate import Estimate

OPT_13B = load_cost_model("opt-13b/a100-80gb")
KINDS: tuple[Attention, ...] = get_args(Attention)
lengths_lists = st.lists(st.integers(1, 20_000), max_size=40)


def test_opt_13b_costs_what_distserve_published() -> None:
    """Its fits, in milliseconds: prefill a + b*n + c*n^2; decode a + b*sum of lengths + c*requests, two sets."""
    for n in (128, 1000, 4000):
        published = 18.10254647 + 0.10191226 * n + 7.122264e-06 * n * n
        assert OPT_13B.iteration([(0, n)], []) * 1000 == pytest.approx(published, rel=1e-4)
    for batch in (1, 16, 64, 95):
        published = 19.93470262 + 0.00062693565 * 500 * batch + 0.038506977 * batch
        assert OPT_13B.iteration([], [500] * batch) * 1000 == pytest.approx(published, rel=1e-4)
    for batch in (107, 160, 250):
        published = 7.166188947 + 0.0005798 * 200 * batch + 0.15831096 * batch
        assert OPT_13B.iteration([], [200] * batch) * 1000 == pytest.approx(published, rel=0.07)


def test_chunks_cost_the_same_attention_however_a_prompt_is_cut() -> None:
    whole = OPT_13B.iteration([(0, 4096)], [])
    parts = sum(OPT_13B.iteration([(before, 512)], []) for before in range(0, 4096, 512))
    assert parts == pytest.approx(whole + 7 * OPT_13B.prefill_fixed_s)


def test_recomputing_one_token_reads_the_kv_before_it() -> None:
    one = OPT_13B.iteration([(8000, 1)], []) - OPT_13B.iteration([(0, 1)], [])
    assert one == pytest.approx(8000 * OPT_13B.decode_attention_s)


def test_balanced_attention_sees_only_the_sum() -> None:
    assert OPT_13B.iteration([], [100, 7900]) == OPT_13B.iteration([], [4000, 4000])


def test_beyond_a_window_a_longer_prefix_costs_nothing_more() -> None:
    model = OPT_13B.with_window(1000)
    for attention in KINDS:
        each, whole = model.with_attention(attention), OPT_13B.with_attention(attention)
        assert each.iteration([], [300, 1000, 9000]) == whole.iteration([], [300, 1000, 1000])
    assert model.iteration([(0, 1000)], []) == OPT_13B.iteration([(0, 1000)], [])
    assert model.iteration([(5000, 64)], []) == model.iteration([(1000, 64)], [])
    # The same however a prompt is cut, as without one; of chunks that compute for longer than they read.
    parts = sum(model.iteration([(before, 700)], []) for before in range(0, 2800, 700))
    assert parts == pytest.approx(model.iteration([(0, 2800)], []) + 3 * OPT_13B.prefill_fixed_s)
    assert model.iteration([(0, 2800)], []) < OPT_13B.iteration([(0, 2800)], [])


def test_kv_that_is_far_costs_more() -> None:
    model = msgspec.structs.replace(OPT_13B, decode_far_s=1e-7, num_near_tokens=10_000)
    assert model.iteration([], [5000, 5000]) == OPT_13B.iteration([], [5000, 5000])
    more = model.iteration([], [5000, 7000]) - OPT_13B.iteration([], [5000, 7000])
    assert more == pytest.approx(2000 * 1e-7)


def test_a_mixture_reads_the_experts_that_its_tokens_hit() -> None:
    model = msgspec.structs.replace(OPT_13B, expert_counts=ExpertCounts(128, 8), experts_s=0.01)

    def reading(chunks: list[tuple[int, int]], lengths: list[int]) -> float:
        return model.iteration(chunks, lengths) - OPT_13B.iteration(chunks, lengths)

    assert reading([], [100]) == pytest.approx(0.01 * 8 / 128)
    assert reading([], [100] * 2) == pytest.approx(0.01 * (8 + 7.5) / 128)
    assert reading([(50, 1)], [100]) == pytest.approx(reading([], [100] * 2))
    assert reading([(0, 4096)], []) == pytest.approx(0.01)
    assert msgspec.json.decode(msgspec.json.encode(model), type=CostModel) == model


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(1, 99)), min_size=1, max_size=9))
def test_chunks_cost_the_same_while_they_are_chosen(chunks: list[tuple[int, int]]) -> None:
    model = msgspec.structs.replace(OPT_13B, expert_counts=ExpertCounts(16, 2), experts_s=0.01)
    costs = model.chunks_together()
    for chunk in chunks[:-1]:
        costs.add(*chunk)
    assert costs.seconds_with(*chunks[-1]) == pytest.approx(model.iteration(chunks, []))


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(1, 99)), max_size=4),
    lengths_lists,
    st.sampled_from(KINDS),
    st.sampled_from([0, 300]),
    st.booleans(),
)
def test_what_is_sought_costs_the_same_to_the_last_bit(
    chunks: list[tuple[int, int]], lengths: list[int], kind: Attention, window: int, has_more: bool
) -> None:
    """The size of one more chunk, and the number of decodes: policies try many, and decide by each bit."""
    model = msgspec.structs.replace(OPT_13B, attention=kind, window=window)
    if has_more:
        more = {"expert_counts": ExpertCounts(16, 2), "experts_s": 0.01, "decode_far_s": 1e-7}
        model = msgspec.structs.replace(model, num_near_tokens=5000, **more)
    one_more, first = model.one_more_chunk(chunks, lengths), model.first_decodes(chunks, lengths)
    for chunk in ((0, 16), (512, 1), (77, 2048)):
        assert one_more.seconds_with(*chunk) == model.iteration([*chunks, chunk], lengths)
    for count in {0, 1, len(lengths) // 2, len(lengths)} & {*range(len(lengths) + 1)}:
        assert first.seconds(count) == model.iteration(chunks, lengths[:count])


def test_plain_attention_waits_for_the_longest() -> None:
    plain = OPT_13B.with_attention("plain")
    assert plain.iteration([], [4000] * 8) == pytest.approx(OPT_13B.iteration([], [4000] * 8))
    assert plain.iteration([], [500] * 63 + [8000]) > OPT_13B.iteration([], [500] * 63 + [8000])
    assert plain_cost([300, 100], num_filling=4) == 4 * 300
    assert plain_cost([300, 100, 100, 100], num_filling=2) == 2 * 300 + 100 + 100
    assert plain_cost([300, 200, 100], num_filling=1) == 600
    assert plain_cost([], num_filling=3) == 0


def test_padded_attention_is_that_of_the_longest_for_each() -> None:
    padded = OPT_13B.with_attention("padded")
    assert padded.decode_attention([100, 300, 200]) == pytest.approx(900 * OPT_13B.decode_attention_s)
    assert padded.decode_attention([]) == 0


@given(lengths_lists, st.floats(0.5, 50))
def test_plain_attention_lies_between_the_sum_and_padding_to_the_longest(
    lengths: list[int], num_filling: float
) -> None:
    cost = plain_cost(lengths, num_filling)
    longest = max(lengths, default=0)
    assert sum(lengths) <= cost <= max(len(lengths), num_filling) * longest + 1e-6
    assert plain_cost(lengths, len(lengths)) == pytest.approx(len(lengths) * longest)


@given(lengths_lists, st.integers(1, 20_000), st.sampled_from(sorted(cost_presets())), st.sampled_from(KINDS))
def test_more_work_never_takes_less_time(
    lengths: list[int], more: int, name: str, attention: Attention
) -> None:
    model = cost_presets()[name].with_attention(attention)
    before = model.iteration([], lengths)
    assert model.iteration([], [*lengths, more]) >= before - 1e-12
    assert model.iteration([(more, 16)], lengths) > before
    if lengths:
        assert model.iteration([], [lengths[0] + more, *lengths[1:]]) >= before - 1e-12


def test_a_prompt_alone_takes_at_least_the_sum_of_its_chunks() -> None:
    assert OPT_13B.fastest_ttft_s(1000, 2048) == OPT_13B.iteration([(0, 1000)], [])
    in_chunks = OPT_13B.iteration([(0, 400)], []) + OPT_13B.iteration([(400, 400)], [])
    assert OPT_13B.fastest_ttft_s(1000, 400) == pytest.approx(in_chunks + OPT_13B.iteration([(800, 200)], []))


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_company_and_longer_prompts_never_make_a_token_faster(length: int, other: int) -> None:
    fastest = OPT_13B.fastest_tbt_s(length)
    assert fastest == OPT_13B.iteration([], [length])
    assert OPT_13B.iteration([(0, 16)], [length, other]) >= fastest
    assert OPT_13B.fastest_tbt_s(length + other) >= fastest


def test_a_file_without_a_host_is_read_as_one_that_nobody_shares(tmp_path: Path) -> None:
    fields = msgspec.to_builtins(OPT_13B)
    assert OPT_13B.host == HostResources(1, gpus_per_pcie_root=2, memory_bytes_per_s=327e9)
    del fields["host"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(fields))
    assert load_cost_model(str(path)).host == HostResources(1, gpus_per_pcie_root=1, memory_bytes_per_s=None)
    path.write_text(json.dumps(fields | {"host": {"gpus_per_pcie_root": 0}}))
    with pytest.raises(ValueError, match="host.gpus_per_pcie_root=0: must be above 0"):
        load_cost_model(str(path))


def test_a_channel_takes_its_latency_and_its_bytes() -> None:
    assert CopyChannel(0.5, 1000.0).seconds(2000) == pytest.approx(2.5)


def test_a_model_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(OPT_13B))
    assert load_cost_model(str(path)) == OPT_13B


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_filling": 0}, "num_filling=0.*: must be above 0"),
        ({"prefill_fixed_s": -1.0}, "prefill_fixed_s=-1.0: must be at least 0"),
        ({"decode_lines": []}, "decode_lines"),
        ({"decode_lines": [{"fixed_s": 0.1, "token_s": -2.0}]}, r"decode_lines\[0\].token_s=-2.0"),
        ({"attention": "odd"}, "odd"),
        ({"speed": 3}, "speed"),
    ],
)
def test_a_bad_model_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(msgspec.to_builtins(OPT_13B) | change))
    with pytest.raises(ValueError, match=message) as caught:
        load_cost_model(str(path))
    assert str(path) in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="opt-13b/a100-80gb"):
        load_cost_model("gpt-5")


def test_presets_are_whole() -> None:
    for name, model in cost_presets().items():
        assert isinstance(model, CostModel)
        assert model.source and model.num_kv_tokens > 10_000, name


def test_kv_takes_as_much_in_the_pool_unless_it_is_said() -> None:
    cost = cost_presets()["opt-13b/a100-80gb"]
    assert cost.pool_bytes_per_token == cost.kv_bytes_per_token
    assert cost.with_pool(cost.kv_bytes_per_token) is cost
    half = cost.with_pool(cost.kv_bytes_per_token / 2)
    assert half.pool_bytes_per_token == cost.kv_bytes_per_token / 2
    # those who know nothing of pools read it as well
    assert b"pool" not in msgspec.json.encode(cost)
    assert msgspec.json.decode(msgspec.json.encode(half), type=CostModel) == half


def test_a_fetch_is_of_the_pool_s_bytes() -> None:
    cost = cost_presets()["opt-13b/a100-80gb"]
    fetch = cost.channels.fetch
    half = Estimate(cost.with_pool(cost.kv_bytes_per_token / 2))
    assert half.fetch(1000) == fetch.seconds(500 * cost.kv_bytes_per_token)
