"""Lines of a job with common instructions, through a prefill and a decode process. The decode instance holds these
once, and the tokens are the same as without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from alignedserve.protocol.messages import DecodeReport, Request
from alignedserve.router.eventlog import replay
from alignedserve.router.events import Received
from tests.cluster.client import connected
from tests.cluster.processes import Processes, Setup, running
from tests.cluster.requests import make_request, results
from tests.engine.helpers import greedy_params
from tests.tiny_models import VOCAB_SIZE

NUM_LINES, NUM_COMMON, NUM_OWN = 12, 160, 20
NUM_COMMON_BLOCKS = NUM_COMMON // 16
# No line needs more of its own.
NUM_OWN_BLOCKS = -(-(NUM_OWN + 100) // 16) + 1


def lines() -> list[Request]:
    dice = Random(7)
    instructions = [dice.randrange(VOCAB_SIZE) for _ in range(NUM_COMMON)]
    found = [
        make_request(instructions + [dice.randrange(VOCAB_SIZE) for _ in range(NUM_OWN)], greedy_params(100))
        for _ in range(NUM_LINES)
    ]
    # Real time does not wait until another line has brought the instructions.
    return [msgspec.structs.replace(each, tier="be") for each in found]


def reports(logs: Path) -> list[DecodeReport]:
    events = (event for path in sorted(logs.glob("router-*.events")) for _, event, _ in replay(path))
    messages = (event.message for event in events if isinstance(event, Received))
    return [message for message in messages if isinstance(message, DecodeReport)]


@pytest.mark.parametrize("link", ["host", "ipc"])
def test_a_jobs_lines_hold_their_instructions_once(
    tiny_model: Callable[[str], Path], tmp_path: Path, link: str
) -> None:
    directory, tokens = tiny_model("llama-gqa-tied"), []
    for shares in (True, False):
        setup = Setup(
            directory,
            link=link,
            num_each=1,
            num_decode_blocks=NUM_LINES * (NUM_COMMON_BLOCKS + NUM_OWN_BLOCKS),
            num_pool_blocks=1000,
            enable_prefix_caching=shares,
        )
        (logs := tmp_path / f"{shares}").mkdir()
        with running(setup, logs) as processes:
            tokens.append(asyncio.run(_say(processes)))
        said = reports(logs)
        in_use = [(each.num_running, setup.num_decode_blocks - each.num_free_blocks) for each in said]
        if shares:
            # All that came while another line ran: at least one, however slow a process is.
            assert sum(report.num_not_copied for report in said) >= NUM_COMMON
            assert all(num <= NUM_COMMON_BLOCKS + NUM_LINES * NUM_OWN_BLOCKS for _, num in in_use)
        else:
            assert not any(report.num_not_copied for report in said)
            assert all(num >= NUM_COMMON_BLOCKS * num_running for num_running, num in in_use)
    assert tokens[0] == tokens[1]


async def _say(processes: Processes) -> list[list[int]]:
    async with connected(processes) as client:
        streams = await client.generate(lines(), at_once=NUM_LINES, every=0)
        return [each.tokens for each in results(streams)]
