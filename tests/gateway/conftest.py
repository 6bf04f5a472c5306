from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.served import SharedGateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[SharedGateway]:
    """What is refused, and what leaves nothing behind, is asked of one gateway for all cases of a file."""
    with SharedGateway.running() as found:
        yield found
