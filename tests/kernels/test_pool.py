"""The thread pool, through the programs that it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from alignedserve.kernels.cpu.sampling import argmax
from tests.kernels.harness import randn

RUN_IN_CHILD = """
import os, torch
from alignedserve.kernels.cpu.sampling import argmax
logits = torch.randn(64, 1000)
argmax(logits)
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(argmax(logits)[0], logits.argmax(1)) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_an_idle_pool_uses_no_cpu() -> None:
    argmax(randn(64, 1000))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.02


def test_threads_may_call_at_once() -> None:
    logits = randn(64, 3000)
    expected = logits.argmax(1)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            if not torch.equal(argmax(logits)[0], expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_more_threads_than_cores() -> None:
    logits = randn(200, 500)
    before = torch.get_num_threads()
    torch.set_num_threads(4 * (os.cpu_count() or 1))
    try:
        for _ in range(300):
            assert torch.equal(argmax(logits)[0], logits.argmax(1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", RUN_IN_CHILD], check=True, timeout=600)
