"""Models, KV and instances in all forms, served: the same tokens as the engine alone says, also when instances die.

Each run has one of two systems, which have all forms between them, and some runs have one form alone. What the forms
do to links between processes is tested in tests/cluster. test_gateways.py has adapters.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from alignedserve import demo
from alignedserve.launch.leftovers import descendants
from tests import quantised_checkpoints
from tests.launch.server import EXACT, POOL, Server, serving
from tests.launch.streams import ask_all, engine_alone

pytestmark = pytest.mark.slow


def with_windows(model: Path, to: Path) -> Path:
    """The model, whose layers see the latest 48 tokens, one excepted."""
    directory = shutil.copytree(model, to / "windows")
    config = json.loads((directory / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config |= {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": 48,
        "layer_types": kinds,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def quantised(model: Path, to: Path) -> Path:
    return quantised_checkpoints.convert(model, quantised_checkpoints.FORMATS["awq-128"], to)[0]


@dataclass(frozen=True)
class Form:
    # Of the demo model, one after the other.
    changes: tuple[Callable[[Path, Path], Path], ...] = ()
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    # How many processes each instance has.
    num_ranks: int = 1
    options: tuple[str, ...] = ()

    def serve_options(self, model: Path) -> list[str]:
        quantization = () if self.quantization is None else ("--quantization", self.quantization)
        kv = ("--kv-cache-dtype", self.kv_cache_dtype)
        ranks = ("--tensor-parallel-size", str(self.num_ranks))
        name = ("--served-model-name", "demo")
        return [str(model), *name, *quantization, *kv, *ranks, *self.options]

    @property
    def has_other_tokens(self) -> bool:
        return bool(self.without_one_part())

    def without_one_part(self) -> list[Form]:
        """The forms that have all of its parts that change tokens but one."""
        places = range(len(self.changes))
        others = [replace(self, changes=self.changes[:each] + self.changes[each + 1 :]) for each in places]
        if self.quantization is not None:
            others.append(replace(self, quantization=None))
        if self.kv_cache_dtype != "auto":
            others.append(replace(self, kv_cache_dtype="auto"))
        return others


COLOCATED = ("--colocated-instances", "1")
OVER_IPC = ("--link", "ipc")
TOGETHER = {
    "windows, quantised checkpoint, KV in fp8, colocated": Form(
        (with_windows, quantised), kv_cache_dtype="fp8", options=COLOCATED
    ),
    "KV in int8, two ranks, over ipc": Form(kv_cache_dtype="int8", num_ranks=2, options=OVER_IPC),
}
ALONE = {
    "windows over ipc": Form((with_windows,), options=OVER_IPC),
    "windows, colocated": Form((with_windows,), options=COLOCATED),
    "KV in fp8": Form(kv_cache_dtype="fp8"),
    "KV in int8": Form(kv_cache_dtype="int8"),
    "weights in int8": Form(quantization="int8"),
    "quantised checkpoint": Form((quantised,)),
    "two ranks": Form(num_ranks=2),
    "two ranks over ipc": Form(num_ranks=2, options=OVER_IPC),
}


@pytest.mark.parametrize(
    "form",
    [
        *(pytest.param(form, id=name, marks=pytest.mark.drawn(one_in=2)) for name, form in TOGETHER.items()),
        *(pytest.param(form, id=name, marks=pytest.mark.drawn(one_in=32)) for name, form in ALONE.items()),
    ],
)
def test_streams_are_the_engines_own(form: Form, tmp_path: Path) -> None:
    model, expected = alone(form, tmp_path / "model")
    # Each part of it makes a difference.
    for number, other in enumerate(form.without_one_part()):
        assert alone(other, tmp_path / str(number))[1] != expected
    assert form.has_other_tokens or engine_alone() == expected
    with serving(*form.serve_options(model), *EXACT, *POOL) as server:
        assert ask_all(server.url)[0] == expected
        instances = server.pids("decode", "prefill", "colocated")
        assert len(instances) == (1 if form.options == COLOCATED else 2)
        names = [name_of(pid, server) for pid in instances]
        # Where an instance is of several processes, one that it has started dies.
        victims = instances if form.num_ranks == 1 else followers(instances)
        assert len(victims) == len(instances)

        def kill() -> None:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        assert ask_all(server.url, kill)[0] == expected
        # Streams may have ended before ranks were killed, where this client came late: idle instances end as well.
        left = followers([server.until_up(name, killed=instances) for name in names])
        assert len(left) == len(instances) * (form.num_ranks - 1)
        server.until_whole()
    assert not any(is_follower(pid) for pid in left)


def alone(form: Form, to: Path) -> tuple[Path, list[str]]:
    """The form's model, made in the directory `to`, and what the engine alone says."""
    model = demo.MODEL_DIR
    for number, change in enumerate(form.changes):
        directory = to / str(number)
        directory.mkdir(parents=True)
        model = change(model, directory)
    return model, engine_alone(form.quantization, form.kv_cache_dtype, model)


def name_of(pid: int, server: Server) -> str:
    return next(str(each["instance_id"]) for each in server.processes() if each["pid"] == pid)


def followers(instances: list[int]) -> list[int]:
    """The ranks that instances' processes have started."""
    return [each for pid in instances for each, _ in descendants(pid) if is_follower(each)]


def is_follower(pid: int) -> bool:
    try:
        return b"rank_follower" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
