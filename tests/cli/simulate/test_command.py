"""The command on workloads small enough to be reckoned by hand; in a process of its own where that can matter."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from alignedserve import demo
from alignedserve.cli.simulate.command import command, model_kv
from alignedserve.engine.config import EngineConfig
from alignedserve.instance.profile.saved import VERSION, Profile
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.world import NO_OVERHEAD
from alignedserve.timing.cost import FREE_COPIES, CostModel, LinearCost
from alignedserve.timing.cost_presets import load_cost_model
from tests.instance.profile.profiles import FACTS, REACH

COST = load_cost_model("opt-13b/a100-80gb")
COMMAND = [sys.executable, "-m", "alignedserve", "simulate"]
# one at a time, and nobody meets another
ALONE = ("--num-prompts", "4", "--request-rate", "0.1", "--burstiness", "1e9", "--input-len", "512")
# The shape of Mistral 7B.
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120)


def rows_of(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    path = tmp_path / "found.json"
    done = CliRunner().invoke(command, [*words, "--output", str(path)])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_a_request_alone_takes_what_the_cost_model_says(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, *ALONE, "--output-len", "100")
    rt = row["outcome"]["mixture"]["rt"]
    # to the router and the pool, back, to the instance, and back to the client
    hops_s = 6 * NO_OVERHEAD.message_s
    for rank in ("mean", "p50", "p99"):
        assert rt["ttft_s"][rank] == pytest.approx(COST.fastest_ttft_s(512, 2048) + hops_s, abs=1e-5)
    assert rt["gap_s"]["p50"] == pytest.approx(COST.fastest_tbt_s(512 + 50), abs=2e-5)
    assert rt["num_requests"] == 4 and rt["attainment"] == 1.0
    # three gaps of ten seconds, and the last request
    span_s = 30 + rt["ttft_s"]["p50"] + 99 * rt["gap_s"]["p50"]
    assert rt["tokens_per_s"] == pytest.approx(4 * 100 / span_s, rel=0.01)
    assert row["outcome"]["prefill_busy"] == pytest.approx(
        4 * COST.fastest_ttft_s(512, 2048) / span_s, rel=0.01
    )


def test_what_iterations_take_beyond_the_cost_model_is_added(tmp_path: Path) -> None:
    more = ("--policy=fcfs", "--colocated-instances=1", "--pace=2", "--outside-ms=5", "--output-len=20")
    (row,) = rows_of(tmp_path, *ALONE, *more)
    rt = row["outcome"]["mixture"]["rt"]
    ttft_s = 2 * COST.fastest_ttft_s(512, 2048) + 0.005
    assert rt["ttft_s"]["p50"] == pytest.approx(ttft_s + 4 * NO_OVERHEAD.message_s, abs=1e-5)
    assert rt["gap_s"]["p50"] == pytest.approx(2 * COST.fastest_tbt_s(512 + 10) + 0.005, abs=2e-5)


def test_objectives_that_cannot_be_kept_are_not(tmp_path: Path) -> None:
    # what the first token leaves of its time is the next ones'; the second waits for two copies
    ttft = ("--slo-ttft-ms", "80")
    least_ms = 1000 * COST.fastest_tbt_s(512)
    for slo_ms, attainment in ((0.9 * least_ms, 0.0), (4 * least_ms, 1.0)):
        (row,) = rows_of(tmp_path, *ALONE, "--output-len", "20", *ttft, "--slo-tbt-ms", str(slo_ms))
        assert row["outcome"]["mixture"]["rt"]["attainment"] == attainment


@pytest.mark.slow
def test_settings_that_repeat_are_compared_and_every_run_is_the_same(tmp_path: Path) -> None:
    few = ("--num-prompts", "30", "--request-rate", "20", "--input-len", "900", "--output-len", "20")
    both = (*few, "--policy", "fcfs", "--policy", "aligned", "--prefill-instances=1", "--prefill-instances=3")
    first, second = simulate(*both, "--be-share", "0.5"), simulate(*both, "--be-share", "0.5")
    assert first.returncode == 0 and first.stdout == second.stdout
    by_setting, by_link = first.stdout.split("Links")
    assert by_setting.count("| fcfs ") == by_setting.count("| aligned ") == 2 * 4
    # a fourth GPU, which decodes, shares a root with the third
    assert by_link.count("PCIe 0 to host") == 4 and by_link.count("PCIe 1 to GPUs") == 2
    assert "Best effort" in first.stdout and "Best effort" not in CliRunner().invoke(command, few).stdout
    rows = rows_of(tmp_path, *both)
    assert [[each["setting"][name] for name in ("policy", "num_prefill")] for each in rows] == [
        ["fcfs", 1],
        ["fcfs", 3],
        ["aligned", 1],
        ["aligned", 3],
    ]
    waits = [each["outcome"]["mixture"]["rt"]["ttft_s"]["p99"] for each in rows]
    assert waits[1] < 0.5 * waits[0] and waits[3] < 0.5 * waits[2]


def test_links_carry_what_is_copied(tmp_path: Path) -> None:
    one = ("--num-prompts=1", "--input-len=512", "--output-len=100")
    (row,) = rows_of(tmp_path, *one)
    links = {each["name"]: each for each in row["outcome"]["links"]}
    prompt_bytes = 512 * COST.kv_bytes_per_token
    assert links.keys() == {"host memory", "PCIe 0 to GPUs", "PCIe 0 to host"}
    # saved by the prefill instance, then fetched by the decode instance
    for name, num_copies in (("host memory", 2), ("PCIe 0 to GPUs", 1), ("PCIe 0 to host", 1)):
        busy_s = num_copies * prompt_bytes / COST.channels.save.bytes_per_s
        assert links[name]["num_bytes"] == pytest.approx(num_copies * prompt_bytes)
        assert links[name]["busy"] == pytest.approx(busy_s / row["outcome"]["window_s"], rel=0.01)
        assert links[name]["slowing"] == 0.0


def test_kv_in_8_bits_is_half_of_the_bytes_on_links(tmp_path: Path) -> None:
    one = ("--num-prompts=1", "--input-len=512", "--output-len=100", "--max-model-len=1000")
    (row,) = rows_of(tmp_path, "opt-13b", "--kv-cache-dtype=fp8", *one)
    links = {each["name"]: each["num_bytes"] for each in row["outcome"]["links"]}
    assert links["host memory"] == pytest.approx(2 * 512 * COST.kv_bytes_per_token / 2)
    gap_s = COST.fastest_tbt_s(562) - COST.decode_attention_s * 562 / 2
    assert row["outcome"]["mixture"]["rt"]["gap_s"]["p50"] == pytest.approx(gap_s, abs=2e-5)


def test_a_model_whose_layers_all_slide_has_blocks_for_its_window(tmp_path: Path) -> None:
    """Requests that would take turns otherwise decode together, and no copy has what is behind their windows."""
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL | {"sliding_window": 512}))
    cost = msgspec.structs.replace(COST, kv_bytes_per_token=131_072, num_kv_tokens=4_096)
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(cost))
    words = [str(tmp_path), "--cost", str(tmp_path / "cost.json"), "--policy=fcfs", "--request-rate=2"]
    words += ["--num-prompts=10", "--input-len=3000", "--output-len=300", "--max-num-batched-tokens=256"]
    words += ["--pool-memory-bytes=100000000000"]
    (sliding,) = rows_of(tmp_path, *words)
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    (whole,) = rows_of(tmp_path, *words)
    assert whole["outcome"]["mean_batch"] == 1.0 < 3.0 < sliding["outcome"]["mean_batch"]
    to_gpus = [
        next(each["num_bytes"] for each in row["outcome"]["links"] if each["name"] == "PCIe 0 to GPUs")
        for row in (sliding, whole)
    ]
    # The windows of ten requests, from the 64 tokens on in which they begin.
    assert to_gpus[0] == pytest.approx(10 * (3008 - 2432) * cost.kv_bytes_per_token)
    assert to_gpus[0] < 0.2 * to_gpus[1]
    ttft_s = [row["outcome"]["mixture"]["rt"]["ttft_s"]["p50"] for row in (sliding, whole)]
    assert ttft_s[0] < ttft_s[1]


@pytest.mark.slow
def test_a_model_that_mixes_layers_has_blocks_for_its_window_in_those_that_slide(tmp_path: Path) -> None:
    """One layer of four attends to all tokens."""
    types = ["full_attention", *(["sliding_attention"] * 3)] * 8
    mixed = MISTRAL | {"architectures": ["MinistralForCausalLM"], "sliding_window": 512, "layer_types": types}
    cost = msgspec.structs.replace(COST, kv_bytes_per_token=131_072, num_kv_tokens=8_192)
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(cost))
    words = [str(tmp_path), "--cost", str(tmp_path / "cost.json"), "--policy=fcfs", "--request-rate=2"]
    words += ["--num-prompts=10", "--input-len=3000", "--output-len=300", "--max-num-batched-tokens=256"]
    words += ["--pool-memory-bytes=100000000000"]
    found = []
    for config in (mixed, MISTRAL):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (row,) = rows_of(tmp_path, *words)
        (to_gpus,) = [
            each["num_bytes"] for each in row["outcome"]["links"] if each["name"] == "PCIe 0 to GPUs"
        ]
        found.append((row["outcome"]["mean_batch"], to_gpus))
    (mixed_batch, mixed_bytes), (whole_batch, whole_bytes) = found
    assert mixed_batch > 1.4 * whole_batch
    # Of sliding layers the windows of ten requests, from the 64 tokens on in which they begin.
    num_tokens = 10 * (0.25 * 3008 + 0.75 * (3008 - 2432))
    assert mixed_bytes == pytest.approx(num_tokens * cost.kv_bytes_per_token)
    assert whole_bytes == pytest.approx(10 * 3008 * cost.kv_bytes_per_token)


@pytest.mark.parametrize("kind", ["colocated", "prefill"])
def test_a_colocated_instance_takes_requests_that_no_prefill_instance_has_room_for(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL | {"sliding_window": 512}))
    cost = msgspec.structs.replace(COST, kv_bytes_per_token=131_072, num_kv_tokens=2_048)
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(cost))
    words = [str(tmp_path), "--cost", str(tmp_path / "cost.json"), "--max-model-len=4000", "--num-prompts=2"]
    words += ["--input-len=3000", "--output-len=30", "--max-num-batched-tokens=256", f"--{kind}-instances=1"]
    if kind == "colocated":
        (row,) = rows_of(tmp_path, *words)
        assert row["outcome"]["mixture"]["rt"]["num_requests"] == 2
    else:
        done = CliRunner().invoke(command, words)
        assert done.stderr == "Error: --max-model-len 4000: an instance holds 2048 tokens\n"


def test_the_demo_model_has_its_name_here_too(tmp_path: Path) -> None:
    assert (
        model_kv(EngineConfig("demo"), SchedulingConfig()).form
        == model_kv(EngineConfig(str(demo.MODEL_DIR)), SchedulingConfig()).form
    )
    # Four layers with K and V of two heads, 64 values of 2 bytes each.
    cost = msgspec.structs.replace(COST, kv_bytes_per_token=4 * 2 * 2 * 64 * 2)
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(cost))
    words = ["--cost", str(tmp_path / "cost.json"), "--num-prompts=1", "--input-len=10", "--output-len=5"]
    (row,) = rows_of(tmp_path, "demo", *words)
    assert row["outcome"]["mixture"]["rt"]["num_requests"] == 1
    done = CliRunner().invoke(command, ["demo"])
    assert done.stderr.startswith("Error: --cost: is for 819200 bytes of KV per token, but demo has ")


def test_blocks_that_are_shared_from_both_ends_are_held_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL | {"sliding_window": 512}))
    engine = EngineConfig(str(tmp_path))
    assert model_kv(engine, SchedulingConfig()).groups.window == 512
    lent = model_kv(engine, SchedulingConfig("bros", share_blocks=True))
    assert (lent.window, lent.groups.window) == (512, 0)


@pytest.mark.slow
def test_a_narrow_host_memory_slows_copies_unless_nothing_is_shared(tmp_path: Path) -> None:
    few = ("--num-prompts=30", "--request-rate=20", "--output-len=20", "--host-memory-bandwidth=5e9")
    (shared,), (apart,) = rows_of(tmp_path, *few), rows_of(tmp_path, *few, "--no-shared-links")
    assert shared["outcome"]["links"][0]["slowing"] > 0.5 and apart["outcome"]["links"][0]["slowing"] == 0
    gaps = [row["outcome"]["mixture"]["rt"]["gap_s"]["p99"] for row in (shared, apart)]
    assert gaps[0] > 2 * gaps[1]
    assert (
        shared["outcome"]["mixture"]["rt"]["tokens_per_s"] < apart["outcome"]["mixture"]["rt"]["tokens_per_s"]
    )


def test_a_trace_with_classes_and_what_is_too_long_for_the_model(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 100, "prompt_len": 300, "output_len": 10},
        {"arrival_s": 101, "prompt_len": 200, "output_len": 15, "tier": "be", "window_s": 60},
        {"arrival_s": 102, "prompt_len": 200, "output_len": 15, "tier": "be", "window_s": 0.001},
        {"arrival_s": 103, "prompt_len": 3000, "output_len": 15},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    done = CliRunner().invoke(command, ["--trace", str(trace), "--max-model-len", "1000"])
    assert done.exit_code == 0, done.output
    assert "3 requests of 233 tokens in and 13 out" in done.stdout
    assert "1 more are left out: longer than max_model_len=1000" in done.stdout
    assert " 50.0 % |" in done.stdout.split("Best effort")[1].split("Instances")[0]


def test_beside_a_backlog_the_instances_are_never_idle(tmp_path: Path) -> None:
    few = ("--num-prompts=5", "--request-rate=1", "--input-len=100", "--output-len=10", "--warmup-s=5")
    (alone,) = rows_of(tmp_path, *few)
    (beside,) = rows_of(tmp_path, *few, "--be-backlog", "20", "--be-output-len", "40")
    assert alone["outcome"]["mixture"]["busy"] < 0.5 < 0.9 < beside["outcome"]["mixture"]["busy"]
    # of all that came, twenty are open at the end
    be, num_complete = beside["outcome"]["mixture"]["be"], beside["outcome"]["num_be_complete"]
    assert num_complete > 20 and be["num_requests"] >= num_complete + 20
    assert beside["outcome"]["mixture"]["rt"]["num_requests"] == 5


@pytest.mark.slow
def test_the_highest_rate_keeps_enough_in_time_and_a_higher_one_does_not(tmp_path: Path) -> None:
    steady = ("--num-prompts=60", "--burstiness=1e9", "--input-len=2000", "--output-len=2")
    (row,) = rows_of(tmp_path, "--find-rate", *steady)
    tried = dict(row["tried"])
    # prompts come in a steady beat: beyond one in the time that it takes, each waits longer than the one before
    most = 1 / COST.fastest_ttft_s(2000, 2048)
    # of ten one may be left out
    assert 0.95 * most < row["request_rate"] < 1.08 * most / 0.9
    assert tried[row["request_rate"]] >= 0.9 > min(tried.values())
    above = [rate for rate in tried if rate > row["request_rate"]]
    assert min(above) <= 1.06 * row["request_rate"]


@pytest.mark.parametrize("is_profile", [False, True])
def test_costs_come_from_a_file_too(tmp_path: Path, is_profile: bool) -> None:
    slow = msgspec.structs.replace(COST, decode_lines=[LinearCost(fixed_s=0.5, token_s=0.0)])
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode(_profile_of(slow) if is_profile else slow))
    (row,) = rows_of(tmp_path, *ALONE, "--output-len", "5", "--cost", str(path))
    assert row["outcome"]["mixture"]["rt"]["gap_s"]["p50"] == pytest.approx(0.5, abs=0.001)


def test_a_profile_of_an_earlier_version_has_free_copies(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    free = msgspec.structs.replace(COST, channels=FREE_COPIES)
    for cost in (free, COST):
        path.write_bytes(msgspec.json.encode(_profile_of(cost)))
        done = CliRunner().invoke(command, [*ALONE, "--output-len", "5", "--cost", str(path)])
        assert done.exit_code == 0
        assert ("copies of KV take no time" in done.stderr) == (cost is free)


def _profile_of(cost: CostModel) -> Profile:
    return Profile(VERSION, FACTS, REACH, num_points=0, errors={}, waited_share=0.0, cost=cost)


@pytest.mark.slow
def test_inputs_are_kept_where_memory_is_short(tmp_path: Path) -> None:
    """They are computed again with KV later: with KV alone nobody is."""
    cost = msgspec.structs.replace(COST, num_kv_tokens=6_000)
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode(cost))
    words = ["--cost", str(path), "--policy", "apt", "--colocated-instances", "1", "--num-prompts", "60"]
    words += ["--request-rate", "6", "--input-len", "900", "--output-len", "60"]
    plain = rows_of(tmp_path, *words)[0]["outcome"]["mixture"]
    hidden = rows_of(tmp_path, *words, "--hidden-cache")[0]["outcome"]["mixture"]
    assert plain["num_dropped"] == 0 < hidden["num_dropped"]


@pytest.mark.slow
def test_what_never_ends_is_said(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cost = msgspec.structs.replace(COST, decode_lines=[LinearCost(fixed_s=60.0, token_s=0.0)])
    path.write_bytes(msgspec.json.encode(cost))
    done = CliRunner().invoke(command, ["--cost", str(path), "--num-prompts", "2", "--output-len", "80"])
    assert done.exit_code == 1 and "2 requests were still open an hour after the last arrival" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--cost", "h100"],
            "must be a JSON file or one of llama-2-70b/h100-80gb-tp4, mixtral-8x7b/h200, opt-13b/a100-80gb",
        ),
        (["--cost", "opt-13b/a100"], "did you mean 'opt-13b/a100-80gb'?"),
        (["--prefill-instances", "0"], "--prefill-instances 0: must be from 1 to 1024"),
        (
            ["--colocated-instances", "1", "--colocated-instances", "5000"],
            "--colocated-instances 5000: must be",
        ),
        (["--policy", "lifo"], "Invalid value for '--policy': 'lifo' is not one of aligned, priority, fcfs"),
        (["--input-len", "20000"], "--max-model-len 16384: every request is longer"),
        (["--pool-memory-bytes", "1000"], "does not hold one request of --max-model-len 16384"),
        (["--hidden-cache"], "--hidden-cache: policy aligned can't keep inputs"),
        (["--hidden-cache", "--policy", "apt"], "--hidden-cache: needs --colocated-instances"),
        (["--pool-kv-dtype", "fp8"], "Invalid value for '--pool-kv-dtype': 'fp8' is not one of auto, int8"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: needs a model"),
        (["opt-30b"], "--cost: is for 819200 bytes of KV per token, but opt-30b has 2752512 in float32"),
        (["opt-13b", "--max-model-len", "4096"], "--max-model-len 4096: the model was made for at most 2048"),
        (["no-such-model"], "model is 'no-such-model'"),
        (["--block-size", "0"], "--block-size 0"),
        (["--gpus-per-pcie-root", "0"], "--gpus-per-pcie-root 0: must be from 1"),
        (["--host-memory-bandwidth", "0"], "--host-memory-bandwidth 0.0: must be above 0"),
        (["--slo-mix", "0.1"], "--slo-mix 0.1: must be like 0.036:0.2,0.5:0.8"),
        (["--slo-mix", "0.1:0.5,0.2:0.4"], "the shares add up to 0.9, must be 1"),
        (["--slo-mix", "0.1:0.5,0.1:0.5"], "names an objective twice"),
        (["--slo-mix", "0:1"], "seconds must be above 0"),
        (["--slo-mix", "-0.1:1"], "--slo-mix -0.1:1: seconds must be above 0, and shares above 0, at most 1"),
        (
            ["--slo-mix", "0.1:-0.5,0.2:1.5"],
            "--slo-mix 0.1:-0.5,0.2:1.5: seconds must be above 0, and shares",
        ),
        (["--slo-mix", "0.1:nan"], "--slo-mix 0.1:nan: seconds must be above 0, and shares above 0"),
        (["--slo-mix", "0.1:0.7,0.2:0.7"], "the shares add up to 1.4, must be 1"),
        (["--slo-mix", "0.1:0.5,,0.2:0.5"], "must be like 0.036:0.2,0.5:0.8"),
        (["--slo-mix", "fast:1"], "--slo-mix fast:1: must be like 0.036:0.2,0.5:0.8"),
        (["--slo-mix", "0.1:0.5:1"], "must be like 0.036:0.2,0.5:0.8"),
        (["--slo-mix", ""], "--slo-mix '': must be like 0.036:0.2,0.5:0.8"),
        (["--pace", "0"], "--pace 0.0: must be above 0"),
        (["--outside-ms", "-1"], "--outside-ms -1.0: must be from 0"),
        (["--find-rate", "--be-share", "1"], "needs real time"),
        (["--find-rate", "--num-prompts", "1", "--output-len", "1"], "--num-prompts 1: max_rate="),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    done = CliRunner().invoke(command, words)
    assert not done.stdout
    error = done.stderr.splitlines()[-1]
    assert message in error and done.exit_code == (2 if " --" in error or " '--" in error else 1)


def test_objectives_are_mixed_in_the_shares_that_are_said() -> None:
    words = ["--num-prompts", "20", "--output-len", "30", "--slo-mix", "0.05:0.25,0.5:0.75"]
    done = CliRunner().invoke(command, words)
    rows = [
        line.split()
        for line in done.stdout.partition("by TBT objective")[2].partition("Instances")[0].splitlines()
        if " ms |" in line
    ]
    assert [(row[7], row[10]) for row in rows] == [("50", "5"), ("500", "15")]


def test_it_is_said_without_a_traceback() -> None:
    done = simulate("--cost", "h100")
    assert done.returncode == 2
    assert (
        done.stderr.startswith("Error: --cost h100: must be a JSON file or one of ")
        and done.stderr.count("\n") == 1
    )


def error_in(trace: Path) -> str:
    return CliRunner().invoke(command, ["--trace", str(trace)]).stderr


def test_a_trace_that_is_none_is_one_line(tmp_path: Path) -> None:
    csv, jsonl = tmp_path / "trace.csv", tmp_path / "trace.jsonl"
    csv.write_text(CSV.replace("ContextTokens", "Context") + "2023-11-16 18:15:46,374,44\n")
    assert "must hold 'TIMESTAMP', 'ContextTokens', 'GeneratedTokens'" in error_in(csv)
    csv.write_text(CSV + "2023-11-16 18:15:46,374,44\n2023-11-16 18:15:47,374,-1\n")
    assert "line 3: GeneratedTokens='-1'" in error_in(csv)
    jsonl.write_text('{"arrival_s": 0, "prompt_len": 3}\n')
    # The names of fields are no options, though one of them is called like one.
    assert "line 1: has 'arrival_s', 'prompt_len': must hold 'TIMESTAMP'" in error_in(jsonl)
    assert "'arrival_s', 'prompt_len', 'output_len' (.jsonl), or 'timestamp'" in error_in(jsonl)
    jsonl.write_text('{"arrival_s": 0, "prompt_len": 3, "output_len": 4, "block_size": 5}\n')
    assert "line 1: Object contains unknown field `block_size`" in error_in(jsonl)


def test_prompts_of_a_mooncake_trace_share_prefixes_unless_that_is_off(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [0, 1]},
        {"timestamp": 9000, "input_length": 900, "output_length": 10, "hash_ids": [0, 2]},
        {"timestamp": 18000, "input_length": 100, "output_length": 10, "hash_ids": [3]},
        {"timestamp": 20000, "input_length": 20000, "output_length": 10, "hash_ids": [*range(40)]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    done = CliRunner().invoke(command, ["--trace", str(trace)])
    assert done.exit_code == 0, done.output
    assert "1 more are left out: longer than max_model_len=16384" in done.stdout
    # A piece of 512 tokens, of 2,000 in all.
    assert done.stdout.split("Prefixes")[1].split("Links")[0].rstrip().endswith(" 25.6 % |")
    assert (
        "Prefixes"
        not in CliRunner().invoke(command, ["--trace", str(trace), "--no-enable-prefix-caching"]).stdout
    )
    assert "Prefixes" not in CliRunner().invoke(command, ["--num-prompts", "2"]).stdout


def test_a_comparison_ends_with_a_verdict_and_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    words = [*ALONE, "--output-len", "20", "--policy", "fcfs", "--policy", "aligned", "--plot", str(path)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == (
        "aligned reaches 100.0 % attainment for real time, the most: next is fcfs, 0.0 points behind."
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_made_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = CliRunner().invoke(command, ["--plot", str(tmp_path / "plot.png")])
    assert done.stderr == "Error: --plot: needs matplotlib; pip install 'alignedserve[plot]'\n"
    assert not done.stdout


@pytest.mark.slow
def test_who_interrupts_it_gets_what_is_done() -> None:
    words = ["--find-rate", "--num-prompts=20", "--policy=fcfs", "--policy=aligned", "--output-len=300"]
    with subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # whoever runs the tests may ignore it, as shells do for what they run in the background
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stdout and running.stderr
        for line in running.stderr:
            if line.startswith("aligned"):
                running.send_signal(signal.SIGINT)
                break
        printed, said = running.communicate(timeout=60)
    assert running.returncode == 130 and "Interrupted: 1 of 2 settings were done" in said
    assert "| fcfs " in printed and "| aligned " not in printed
