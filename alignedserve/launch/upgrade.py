"""Whether the version that is installed now can take the place of the one that runs.

A process that is replaced imports what is installed on its host. If that is too different, the router refuses it, and
the old process is gone by then. So `alignedserve restart` looks before it replaces anything.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import alignedserve
from alignedserve.launch.control import RestartFailed
from alignedserve.protocol.versions import RULE, work_together

# seconds that Ray may take to run something on a node
_LOOK_S = 60.0
_VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)


def installed_version() -> str:
    """Returns the version that a process would import now. This process may have imported another one. Raises
    OSError, and ValueError if the file has no version."""
    path = Path(alignedserve.__file__).with_name("version.py")
    if found := _VERSION.search(path.read_text()):
        return found[1]
    raise ValueError(f"{path}: has no version")


async def check_installed(nodes: Iterable[tuple[str, str | None]]) -> None:
    """`nodes` are the names of hosts and Ray's ids of them. Raises RestartFailed if the version that is installed on
    one of them can't work with the one that runs."""
    for name, node_id in nodes:
        try:
            found = installed_version() if node_id is None else await _installed_on(node_id)
        except (OSError, ValueError, RayError) as error:
            reason = str(error).strip().split("\n")[0]
            raise RestartFailed(f"{name}: the installed version can't be read: {reason}") from error
        if not work_together(alignedserve.__version__, found):
            raise RestartFailed(
                f"version {found} is installed on {name}, and {alignedserve.__version__} runs; {RULE}. "
                "Stop the system and start it again"
            )


async def _installed_on(node_id: str) -> str:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    look = ray.remote(installed_version).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    try:
        async with asyncio.timeout(_LOOK_S):
            found: str = await look.remote()
    except TimeoutError:
        raise ValueError(f"the node does not answer within {_LOOK_S:g} s") from None
    return found
