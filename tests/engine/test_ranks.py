"""A model divided among processes computes the same as one process, and all end when any of them ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.engine.choices import check_num_gpus, check_ranks
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.rank_leader import LedModel, RankLost
from alignedserve.engine.ranks import watch
from alignedserve.engine.ranks.channel import ChannelClosed, Kind, RankChannel
from alignedserve.engine.ranks.watch import SILENCE_S, Silence
from alignedserve.launch.leftovers import descendants
from alignedserve.models.hf_config import load_model_config
from alignedserve.models.listed_weights import check_files, num_weight_bytes
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.ops.shard import Shard
from alignedserve.ops.step import StepInputs
from tests import quantised_checkpoints
from tests.engine.helpers import EvictEveryStep, greedy_params, make_instance, run, tokens
from tests.quantised_checkpoints import FORMATS
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]
# Their iterations wait for other processes, which may be many on a busy machine: few and short prompts, few tokens.
NUM_TOKENS = 8
PROMPTS = slice(2, 6)
# What takes minutes: each case starts processes, and waits for them.
in_turn = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=6)]


def marked(marks: list[pytest.MarkDecorator], *cases: Any) -> list[Any]:
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=marks) for each in cases]


def said(instance: LocalInstance, backend: str = "") -> list[list[int]]:
    """The interpreter of Triton's kernels takes a hundred times as long as the others: it has fewer tokens."""
    return tokens(run(instance, share(prompts(), backend), greedy_params(num_new(backend))))


def expected(directory: Path, backend: str = "") -> list[list[int]]:
    return [each[: num_new(backend)] for each in share(greedy(directory), backend)]


def share(of_all: list[list[int]], backend: str) -> list[list[int]]:
    return of_all[2:6:3] if backend == "triton" else of_all[PROMPTS]


def num_new(backend: str) -> int:
    return 3 if backend == "triton" else NUM_TOKENS


def divided(
    directory: Path, size: int = 2, backend: str = "cpu", policy: Any = None, **more: Any
) -> LocalInstance:
    options = {"tensor_parallel_size": size, "attention_backend": backend, **more}
    return make_instance(directory, policy, kv_cache_memory_bytes=16 << 20, **options)


def leader_of(instance: LocalInstance) -> Any:
    model = instance.engine._runner._model
    assert isinstance(model, LedModel)
    return model._leader


def followers_of(instance: LocalInstance) -> list[subprocess.Popen[bytes]]:
    return [process for process, _ in leader_of(instance)._followers]


@pytest.mark.parametrize("backend", marked(in_turn, "cpu", "torch"))
def test_ranks_divide_a_quantised_checkpoint(tmp_path: Path, backend: str) -> None:
    directory, plain = quantised_checkpoints.build("llama", FORMATS["fp8-tensor"], tmp_path)
    assert said(divided(directory, 2, backend)) == expected(plain)


@pytest.mark.parametrize("backend", marked(in_turn, "cpu", "torch", "triton"))
def test_ranks_divide_experts_in_mxfp4(tmp_path: Path, backend: str) -> None:
    directory, plain = quantised_checkpoints.build_mxfp4(tmp_path)
    assert said(divided(directory, 2, backend), backend) == expected(plain, backend)


def test_ranks_do_not_cut_through_a_group(tmp_path: Path) -> None:
    directory, _ = quantised_checkpoints.build("llama", FORMATS["gptq-4-128"], tmp_path)
    config = load_model_config(directory)
    check_files(config, directory, 1)
    with pytest.raises(ValueError, match="inputs 0 to 64: must be whole groups of 128"):
        # Each would have 64 of the 256 inputs of a down projection.
        check_files(config, directory, 4)


@pytest.mark.parametrize(
    ("family", "size", "backend"),
    [
        ("llama-gqa-tied", 2, "cpu"),
        *marked(
            in_turn,
            ("llama3-rope", 2, "torch"),
            # Two KV heads, which four ranks have twice.
            ("qwen3", 4, "torch"),
            ("mixtral", 2, "torch"),
            ("gpt-oss", 2, "cpu"),
            ("gpt-oss", 4, "torch"),
            ("opt-post-norm", 2, "cpu"),
            ("opt", 4, "cpu"),
            # What GPUs run, in the interpreter.
            ("qwen3-moe-unnormed", 2, "triton"),
            ("llama-gqa-tied", 2, "triton"),
        ),
        # Every third of what has experts, several ranks, or the other backend, so that each run has one of them.
        *marked(
            [pytest.mark.slow, pytest.mark.drawn(one_in=3)],
            ("qwen3-moe-unnormed", 2, "cpu"),
            ("qwen2", 4, "cpu"),
            ("qwen2", 2, "torch"),
        ),
    ],
)
def test_ranks_say_what_transformers_says(
    tiny_model: Directory, family: str, size: int, backend: str
) -> None:
    directory = tiny_model(family)
    assert said(divided(directory, size, backend), backend) == expected(directory, backend)


@pytest.mark.slow
def test_what_moves_and_splits_work_changes_nothing(tiny_model: Directory) -> None:
    """Blocks hold the KV of all ranks: they come back whole."""
    directory = tiny_model("llama-gqa-tied")
    instance = divided(directory, policy=EvictEveryStep, max_prefill_chunk=7, block_size=8)
    assert said(instance) == expected(directory)


@pytest.mark.slow
@pytest.mark.drawn(one_in=8, turn=6)
def test_log_probabilities_and_embeddings_are_those_of_one_rank(tiny_model: Directory) -> None:
    directory = tiny_model("qwen2")
    params = greedy_params(max_tokens=2, prompt_logprobs=0)
    found = []
    for instance in (divided(directory), make_instance(directory)):
        outputs = run(instance, prompts()[PROMPTS], params)
        each = [one for events in outputs for event in events for one in event.prompt_logprobs or ()]
        found.append(torch.tensor([one.logprobs[0] for one in each]))
    assert len(found[0]) and torch.allclose(found[0], found[1], atol=1e-4)


@pytest.mark.parametrize("scheme", marked(in_turn, "int8", "int4"))
def test_ranks_keep_fewer_bits_as_well(tiny_model: Directory, scheme: str) -> None:
    directory = tiny_model("llama-mha")
    alone = said(divided(directory, quantization=scheme))
    assert alone == said(divided(directory, quantization=scheme, max_prefill_chunk=7))
    assert alone != expected(directory)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", *marked(in_turn, "torch")])
def test_a_rank_that_is_killed_is_named(tiny_model: Directory, backend: str) -> None:
    instance = divided(tiny_model("llama-mha"), backend=backend)
    (follower,) = followers_of(instance)
    follower.kill()
    with pytest.raises(RankLost, match=rf"rank 1 \(process {follower.pid}\) has ended: -9"):
        said(instance)
    with pytest.raises(RankLost):
        instance.engine._runner._model.forward()


@pytest.mark.slow
def test_nothing_that_was_computed_counts_when_a_rank_was_lost_meanwhile(tiny_model: Directory) -> None:
    instance = divided(tiny_model("llama-mha"))
    instance.engine.confirm()
    (follower,) = followers_of(instance)
    follower.kill()
    assert leader_of(instance).lost()
    with pytest.raises(RankLost, match="has ended: -9"):
        instance.engine.confirm()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", *marked(in_turn, "torch")])
def test_a_rank_that_hangs_is_named(
    tiny_model: Directory, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE_S", 3.0)
    instance = divided(tiny_model("llama-mha"), backend=backend)
    (follower,) = followers_of(instance)
    follower.send_signal(signal.SIGSTOP)
    with pytest.raises(RankLost, match=rf"rank 1 \(process {follower.pid}\) has hung"):
        said(instance)


def test_a_count_that_stands_still_for_long_is_silence() -> None:
    silence = Silence()
    assert not silence.is_over(5, 100.0)
    assert not silence.is_over(6, 100.0 + SILENCE_S)
    assert not silence.is_over(6, 100.0 + 2 * SILENCE_S)
    assert silence.is_over(6, 100.1 + 2 * SILENCE_S)


@pytest.mark.slow
def test_ranks_end_with_their_leader(tiny_model: Directory) -> None:
    instance = divided(tiny_model("llama-mha"))
    (follower,) = followers_of(instance)
    leader_of(instance).close()
    assert follower.returncode is not None

    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.engine.test_ranks import divided, followers_of\n"
        "instance = divided(Path(sys.argv[1]))\n"
        "print(followers_of(instance)[0].pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tiny_model("llama-mha"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        # It is readable when the process has ended.
        os.set_blocking(pidfd, True)
        import select

        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)


@pytest.mark.slow
def test_nothing_is_left_of_ranks_that_can_not_load(tiny_model: Directory, tmp_path: Path) -> None:
    for path in tiny_model("llama-mha").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight is missing") as error:
        divided(tmp_path)
    # The error, which has hold of what was being built, is here still.
    assert error.value is not None and not any(
        b"rank_follower" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid, _ in descendants(os.getpid())
    )


def test_what_another_rank_has_failed_at_is_said_here() -> None:
    ours, theirs = (RankChannel(end) for end in socket.socketpair())
    theirs.send(Kind.FAILED, b"no compiler is there")
    with pytest.raises(ValueError, match="no compiler is there"):
        ours.expect(Kind.LOADED)
    theirs.send(Kind.READY)
    with pytest.raises(RuntimeError, match="sent READY, not LOADED"):
        ours.expect(Kind.LOADED)
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.expect(Kind.LOADED)
    ours.close()


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_step_is_the_same_when_another_rank_has_unpacked_it(num_groups: int) -> None:
    steps = [StepInputs(16, 4, 5, num_groups=num_groups) for _ in range(2)]
    ours, theirs = steps
    ours.host.token_ids[:6], ours.host.positions[:6] = range(10, 16), [7, 0, 1, 2, 3, 4]
    ours.host.slots[:, :6] = np.arange(20, 20 + 6 * num_groups).reshape(num_groups, 6)
    ours.host.outputs[:2] = [0, 5]
    ours.host.query_start[:3], ours.host.context_len[:2], ours.host.is_reversed[:2] = (
        [0, 1, 6],
        [8, 5],
        [0, 1],
    )
    ours.host_block_table(2, 3)[:] = np.arange(6 * num_groups).reshape(2, num_groups, 3)
    ours.commit(6, 2, 2)
    assert len(ours.packed()) == 4 * (4 + (2 + num_groups) * 6 + 2 * 2 + 2 + 3 + 2 * 3 * num_groups)
    theirs.unpack(ours.packed())
    assert theirs.shape == ours.shape and theirs.packed() == ours.packed()
    assert all(
        np.array_equal(getattr(theirs.host, name), getattr(ours.host, name)) for name in vars(ours.host)
    )


def test_the_adapters_of_a_step_go_to_other_ranks() -> None:
    ours, theirs = (StepInputs(16, 4, 5, has_adapters=True) for _ in range(2))
    ours.host.outputs[:2], ours.host.query_start[:3] = [0, 3], [0, 1, 4]
    assert ours.adapters and theirs.adapters
    for numbers in ([2, 1], [0, 0], [0, 3]):
        ours.adapters.fill(np.array(numbers), np.array([1, 3]), ours.host.outputs[:2])
        ours.commit(4, 2, 2)
        theirs.unpack(ours.packed())
        assert theirs.has_adapters == ours.has_adapters == any(numbers)
        if any(numbers):
            assert theirs.adapters.of_rows(4).tolist() == [numbers[0]] + 3 * [numbers[1]]
            assert theirs.adapters.of_rows(2).tolist() == numbers


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama-mha", {"tensor_parallel_size": 3}, "the model's 4 KV heads can't be divided among 3 ranks"),
        (
            "qwen3",
            {"tensor_parallel_size": 8},
            "the model's 4 attention heads can't be divided among 8 ranks",
        ),
        (
            "opt",
            {"tensor_parallel_size": 2, "hidden_cache": True},
            "hidden_cache needs instances of one rank",
        ),
    ],
)
def test_what_can_not_be_divided_is_refused(
    tiny_model: Directory, family: str, options: dict[str, Any], message: str
) -> None:
    config = EngineConfig(model="-", **options)
    with pytest.raises(
        ValueError, match=f"tensor_parallel_size={options['tensor_parallel_size']}: {message}"
    ):
        check_ranks(config, load_model_config(tiny_model(family)))


def test_each_rank_has_a_gpu() -> None:
    config = EngineConfig(model="-", tensor_parallel_size=4)
    check_num_gpus(config, 4)
    with pytest.raises(
        ValueError, match="tensor_parallel_size=4: needs a GPU for each rank, and 3 can be used"
    ):
        check_num_gpus(config, 3)
    with pytest.raises(ValueError, match="device='cuda:1': tensor_parallel_size=4 needs 4 GPUs, not one"):
        check_num_gpus(replace(config, device="cuda:1"), 4)
    check_num_gpus(EngineConfig(model="-", device="cuda:1"), 2)


def test_a_rank_has_its_share_of_the_weights(tiny_model: Directory) -> None:
    config = load_model_config(tiny_model("llama-mha"))
    whole = num_weight_bytes(config, torch.float32, None)
    halves = [num_weight_bytes(config, torch.float32, None, shard=Shard(rank, 2)) for rank in (0, 1)]
    # Both have the table of embeddings, and the norms.
    both = 4 * (config.vocab_size * config.hidden_size + (2 * config.num_layers + 1) * config.hidden_size)
    assert sum(halves) == whole + both


@pytest.mark.parametrize(("count", "size"), [(8, 2), (2, 4), (4, 4), (1, 8)])
def test_units_are_divided_evenly(count: int, size: int) -> None:
    parts = [Shard(rank, size).part(count, width=3) for rank in range(size)]
    num_holders = [sum(part.start <= value < part.stop for part in parts) for value in range(3 * count)]
    assert set(num_holders) == {max(size // count, 1)}


@pytest.mark.parametrize(("count", "size"), [(200, 2), (7, 4), (3, 8)])
def test_uneven_parts_follow_each_other(count: int, size: int) -> None:
    parts = [Shard(rank, size).uneven_part(count) for rank in range(size)]
    assert [value for part in parts for value in range(part.start, part.stop)] == [*range(count)]
