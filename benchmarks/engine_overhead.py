"""Measures the host's work around the model's forward call, in steps of greedy decodes with all requests running.

Engine, sampler and decode worker are real. The model returns immediately with a constant. It prints:

    a step    the whole step, from call to return
    exposed   from the arrival of the tokens to the next launch, when a GPU would be idle. It includes the caller of
              `execute`, which does nothing here, and a decode worker's schedule and report
    hidden    from the launch to the wait for the tokens, while a GPU would compute

    python -m benchmarks.engine_overhead [--batch 64] [--context 1000] [--steps 400]
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from alignedserve.decode_worker.worker import DecodeWorker
from alignedserve.engine.build import build_engine
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine
from alignedserve.engine.request import NewRequest
from alignedserve.instance.direct import DirectEngine
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.ops.base import CompiledModel
from alignedserve.protocol.messages import DecodeReport, Offer, Request, Work
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import Epoch, PoolBlockId, RequestId, RequestKey
from benchmarks.harness import parser_of

CONFIG = """{{"architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64,
"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": {max_len},
"rms_norm_eps": 1e-5, "torch_dtype": "float32"}}"""
TOKEN = 7


class InstantModel(CompiledModel):
    """Records when it is launched, and when its tokens are awaited."""

    def __init__(self, max_rows: int) -> None:
        self._tokens = np.full(max_rows, TOKEN, dtype=np.int32)
        self._launched_s = self._arrived_s = time.perf_counter()
        self.exposed_s: list[float] = []
        self.hidden_s: list[float] = []

    def forward(self) -> torch.Tensor:
        self._launched_s = time.perf_counter()
        self.exposed_s.append(self._launched_s - self._arrived_s)
        return torch.empty(0)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("greedy tokens come with the step")

    def final_states(self, rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no embeddings are asked for")

    def likeliest(self, num_rows: int) -> np.ndarray:
        self.hidden_s.append(time.perf_counter() - self._launched_s)
        self._arrived_s = time.perf_counter()
        return self._tokens[:num_rows]


def build(args: Namespace) -> tuple[Engine, InstantModel]:
    # The prompts take several steps, in which finished ones already decode.
    max_len = args.context + 2 * args.steps + args.batch * args.context // 1024 + 100
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(CONFIG.format(max_len=max_len))
        options = {"max_num_seqs": args.batch, "enable_prefix_caching": False, "use_tqdm": False}
        config = EngineConfig(directory, load_format="dummy", **options)
        engine = build_engine(config).engine
    model = InstantModel(args.batch)
    engine._runner._model = model
    return engine, model


def params_of(args: Namespace) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def stepping(engine: Engine, args: Namespace) -> Callable[[], int]:
    instance = LocalInstance(engine)
    for index in range(args.batch):
        instance.add_request(RequestId(str(index)), [1] * args.context, params_of(args), 0)
    while len(instance.step()) < args.batch:
        pass
    return lambda: len(instance.step())


def executing(engine: Engine, args: Namespace) -> Callable[[], int]:
    work, direct = [], DirectEngine(engine)
    for index in range(args.batch):
        prompt, key = [1] * args.context, RequestId(str(index))
        new = NewRequest(key, prompt, params_of(args), 0, output=[TOKEN], num_computed=args.context)
        request = direct.begin(new)
        direct.grow([(request, 1 + args.steps)])
        work.append((request, 1))
    return lambda: len(engine.execute(work))


def working(engine: Engine, args: Namespace) -> Callable[[], int]:
    pulled = threading.Semaphore(0)
    form = engine.cache.format
    transfers = LiveTransfers(engine.cache.parts, Epoch(1), pulled.release, num_groups=form.num_groups)
    worker = DecodeWorker(engine, transfers)
    worker.use_pool(np.zeros((1, form.column_bytes), dtype=np.uint8))
    worker.on(Offer(offered(args, form.num_columns(args.context)), is_batch=True))
    worker.step()
    for _ in range(args.batch):
        pulled.acquire()
    worker.step()
    # Ends the thread that copies.
    worker.leave_pool()

    def step() -> int:
        messages, _ = worker.step()
        return sum(len(message.news) for message in messages if isinstance(message, DecodeReport))

    return step


def offered(args: Namespace, num_blocks: int) -> list[Work]:
    works = []
    for number in range(1, args.batch + 1):
        request = Request(RequestKey(number), [1] * args.context, params_of(args), seed=0, arrival_s=0.0)
        works.append(Work(request, [TOKEN], args.context, [PoolBlockId(0)] * num_blocks))
    return works


def measure(name: str, start: Callable[[Engine, Namespace], Callable[[], int]], args: Namespace) -> None:
    engine, model = build(args)
    step = start(engine, args)
    times = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        num_tokens = step()
        times.append(time.perf_counter() - begin)
        assert num_tokens == args.batch
    p99 = statistics.quantiles(times, n=100)[98]
    print(f"{name:8} {in_ms(times)} ms a step, {p99 * 1e3:.3f} ms (p99)", end="; ")
    print(f"exposed {in_ms(model.exposed_s[-args.steps :])}, hidden {in_ms(model.hidden_s[-args.steps :])}")


def in_ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.3f}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print(f"batch {args.batch}, context {args.context}, medians of {args.steps} steps")
    for name, start in (("step", stepping), ("execute", executing), ("worker", working)):
        measure(name, start, args)


if __name__ == "__main__":
    main()
