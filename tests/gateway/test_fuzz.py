"""schemathesis over the whole description, against a real gateway. `make fuzz` gives it more time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.gateway.served import Served, served
from tests.store.redis_process import redis_running

CONFIG = Path(__file__).parent / "schemathesis.toml"
NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
# the systematic part alone takes a minute
PHASES = "examples,coverage,fuzzing,stateful" if "FUZZ_EXAMPLES" in os.environ else "examples,fuzzing"
# of all examples together, on a machine that has other things to do
TIMEOUT_S = 120 + 20 * NUM_EXAMPLES


async def fuzz(at: Served, directory: Path) -> tuple[int | None, str]:
    url = f"{at.http.base_url}/openapi.json"
    program = Path(sys.executable).parent / "schemathesis"
    command = [str(program), "--config-file", str(CONFIG), "run", url]
    options = ["--max-examples", str(NUM_EXAMPLES), "--continue-on-failure", "--no-color"]
    options += ["--phases", PHASES, "--generation-database", "none", "--workers", "1"]
    process = await asyncio.create_subprocess_exec(
        *command, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=directory
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, output.decode()


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_nothing_that_can_be_sent_is_our_fault(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with redis_running() as redis, served(store_url=redis.url) as at:
            await at.router.until(lambda: list(at.router.hub) != [])
            code, output = await fuzz(at, tmp_path)
            assert code == 0, output[-8000:]
            # nothing is left of any of it
            await asyncio.wait_for(at.process.drain_state.until_idle(), 20)
            assert at.router._open == {}
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200

    asyncio.run(scenario())


def test_errors_are_described_as_they_are() -> None:
    async def scenario() -> None:
        async with served() as at:
            described = (await at.http.get("/openapi.json")).json()
            for path, operations in described["paths"].items():
                for method, operation in operations.items():
                    answers = operation["responses"]
                    assert "422" not in answers and {"400", "401", "404", "413", "429", "503"} <= set(answers)
                    schema = answers["400"]["content"]["application/json"]["schema"]
                    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
                    assert schema == {"$ref": f"#/components/schemas/{name}"}, (method, path)
            assert "HTTPValidationError" not in json.dumps(described)

    asyncio.run(scenario())
